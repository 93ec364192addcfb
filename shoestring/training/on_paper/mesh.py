"""How a step is spread over a described cluster."""

from __future__ import annotations

from dataclasses import dataclass

from shoestring.core.errors import Mistake
from shoestring.training.on_paper.machines import Machines
from shoestring.training.on_paper.transformer import Transformer


@dataclass(frozen=True)
class PaperMesh:
    """Ranks count along tensor first, then data, then stage: a tensor line is within a machine if it fits."""

    data: int = 1
    stage: int = 1
    tensor: int = 1
    micro_batch: int = 1  # sequences in a micro-batch
    virtual: int = 1  # chunks of the model on each stage (interleaved 1F1B)
    checkpointing: bool = True  # every block is recomputed in backward
    sharding: int = 0  # ZeRO stage: 0 nothing, 1 the optimizer state, 3 everything, gathered block by block

    @property
    def world(self) -> int:
        return self.data * self.stage * self.tensor

    def __str__(self) -> str:
        words = [f"data {self.data}", f"stage {self.stage}", f"tensor {self.tensor}", f"micro-batch {self.micro_batch}"]
        words += [f"{self.virtual} parts a stage"] if self.virtual > 1 else []
        words += ["checkpointing"] if self.checkpointing else []
        words += [f"sharding {self.sharding}"] if self.sharding else []
        return ", ".join(words)

    def pieces(self, batch: int) -> int:
        """Micro-batches that each replica computes in a step."""
        return batch // (self.data * self.micro_batch)

    def inside(self, axis: str, machines: Machines) -> int:
        """Members of one line along an axis that are in the same machine."""
        if axis == "tensor":
            return min(self.tensor, machines.devices)
        copies = max(1, min(self.data, machines.devices // self.tensor))
        if axis == "data":
            return copies
        return max(1, machines.devices // (self.tensor * self.data))

    def wrong(self, model: Transformer, batch: int, machines: Machines) -> str:
        """Why the model can't be spread like this; empty if it can."""
        if batch % (self.data * self.micro_batch):
            return f"a batch of {batch} can't be divided by {self.data} copies x micro-batches of {self.micro_batch}"
        if model.layers % (self.stage * self.virtual):
            return f"{model.layers} blocks can't be divided by {self.stage} stages x {self.virtual} parts"
        for name, size in (
            ("heads", model.heads),
            ("key-value heads", model.kv_heads or model.heads),
            ("vocabulary", model.vocabulary),
            ("feedforward", model.inner),
        ):
            if size % self.tensor:
                return f"{size} {name} can't be divided by {self.tensor} tensor ways"
        if self.tensor > machines.devices:
            return f"{self.tensor} tensor ways would leave a machine of {machines.devices} devices"
        if self.virtual > 1 and (self.stage == 1 or self.pieces(batch) % self.stage):
            return f"interleaving wants micro-batches ({self.pieces(batch)}) in multiples of its stages ({self.stage})"
        if self.sharding == 3 and self.stage * self.tensor > 1:
            return "everything sharded between copies is planned without stages and tensor ways"
        if self.sharding not in (0, 1, 3):
            return f"sharding {self.sharding} is not planned on paper; 0, 1 and 3 are"
        return ""

    def check_mesh(self, model: Transformer, batch: int, machines: Machines) -> PaperMesh:
        if why := self.wrong(model, batch, machines):
            raise Mistake(f"{self}: {why}")
        return self
