"""pfl 0.6.0 and Flower 1.41 as contestants; their interpreter has them and torch, and not shoestring."""

from __future__ import annotations

import time
from itertools import cycle
from typing import Any

import torch
from speed_contestant import asked, tell
from speed_models import RATE, Case, prepared


def pfl(case: Case, cores: int) -> None:
    """Federated averaging by pfl's own simulation; its local training goes through a client's data in order, and is not shuffled."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    data = case.data()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = case.made()

        def loss(self, x: Any, y: Any, eval: bool = False) -> Any:
            return case.loss(self.inside(x), y)

        def metrics(self, x: Any, y: Any, eval: bool = False) -> dict[str, Any]:
            return {"loss": Weighted(float(self.loss(x, y)), 1)}

    inside = Model()
    model = PyTorchModel(inside, torch.optim.SGD, torch.optim.SGD(inside.parameters(), 1.0))
    users = cycle(range(len(data)))
    clients = FederatedDataset(lambda number: Dataset(data[number], user_id=str(number)), lambda: next(users))
    turns: list[Any] = []

    class Turns(TrainingProcessCallback):
        begin = 0.0

        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            if central_iteration == 0:
                turns.append(asked())
            else:
                tell(time.perf_counter() - self.begin)
            stop = next(turns[0], "over") == "over"
            self.begin = time.perf_counter()
            return stop, Metrics()

    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=1_000_000,
            evaluation_frequency=1_000_000,
            train_cohort_size=len(data),
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=clients, val_data=None),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=case.epochs, local_learning_rate=RATE, local_batch_size=case.batch
        ),
        model_eval_params=None,
        callbacks=[Turns()],
    )


def flower(case: Case, cores: int) -> None:
    """Flower's simulation with Ray, a core a client."""
    import logging

    from flwr.client import ClientApp, NumPyClient
    from flwr.common import ndarrays_to_parameters
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)

    class Client(NumPyClient):
        def __init__(self, number: int) -> None:
            self.model, data = prepared(case.name)  # a function of a module: every process of Ray keeps what it made
            self.x, self.y = data[number]

        def fit(self, parameters: Any, config: Any) -> Any:
            self.model.load_state_dict(
                {name: torch.from_numpy(value) for name, value in zip(self.model.state_dict(), parameters, strict=True)}
            )
            optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
            for places in (
                places for _ in range(case.epochs) for places in torch.randperm(len(self.x)).split(case.batch)
            ):
                optimizer.zero_grad()
                case.loss(self.model(self.x[places]), self.y[places]).backward()
                optimizer.step()
            return [value.numpy() for value in self.model.state_dict().values()], len(self.x), {}

    turns: list[Any] = []

    class Turns(FedAvg):
        begin = 0.0

        def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
            if server_round == 3:  # the first two warm up the actors
                turns.append(asked())
            if turns and next(turns[0], "over") == "over":
                raise KeyboardInterrupt  # Flower has no other way to end before its last round
            self.begin = time.perf_counter()
            return super().configure_fit(server_round, parameters, client_manager)

        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            found = super().aggregate_fit(server_round, results, failures)
            if turns:
                tell(time.perf_counter() - self.begin)
            return found

    def server(context: Any) -> Any:
        weights = [value.numpy() for value in case.made().state_dict().values()]
        strategy = Turns(
            fraction_fit=1.0,
            fraction_evaluate=0.0,
            min_fit_clients=case.clients,
            min_available_clients=case.clients,
            initial_parameters=ndarrays_to_parameters(weights),
        )
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=1_000_000))

    client = ClientApp(client_fn=lambda context: Client(int(context.node_config["partition-id"])).to_client())
    run_simulation(
        ServerApp(server_fn=server),
        client,
        num_supernodes=case.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0},
            "init_args": {"num_cpus": cores, "logging_level": 40},
        },
    )
