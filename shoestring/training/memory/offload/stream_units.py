"""Units of a streamed model: modules whose weights are read and written together, and the weights that are split by
rows instead."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from shoestring.core.private import has_gradient_hooks, own_parameters
from shoestring.core.running.run import Run
from shoestring.training.memory.offload import offloaded_optimizer
from shoestring.training.memory.offload.disk_store import AlignedBuffer, pages
from shoestring.training.memory.offload.offloaded_optimizer import in_parts, strides_of
from shoestring.training.memory.offload.row_split import can_be_split

LINE = 64  # bytes: alignment of weights in a unit


class StreamUnit:
    """A module whose weights are read and written together."""

    def __init__(self, name: str, module: nn.Module, members: Mapping[str, nn.Parameter]) -> None:
        self.name, self.module = name, module
        self.members = dict(members)
        self.layout: dict[str, tuple[int, tuple[int, ...]]] = {}  # name of a weight -> offset in the buffer, strides
        self.regions: dict[str, int] = {}  # region's name -> its offset in the buffer
        self.sizes: dict[str, int] = {}  # region's name -> bytes
        self.size = 0
        for trained in (True, False):
            kind = {one: parameter for one, parameter in self.members.items() if parameter.requires_grad is trained}
            if kind:
                self.lay_out(kind, name if trained or not self.regions else f"frozen of {name}")
        self.changes = any(
            parameter.requires_grad for parameter in self.members.values()
        )  # the region that is written when `name` is
        self.buffer: AlignedBuffer | None = None  # its present buffer; None: not in memory
        self.awaited: set[nn.Parameter] = set()  # parameters whose gradient is still to come in this step
        self.replayed = False  # whether its backward has begun
        self.evicted = False  # whether it left memory since its backward began
        self.loaded = False  # whether its parameters are views of the buffer
        self.dirty = False  # whether its parameters were stepped and not written yet
        self.partial = False  # whether its frozen weights are missing from the buffer

    def lay_out(self, members: Mapping[str, nn.Parameter], region: str) -> None:
        """Assign these weights to a region."""
        self.size = begin = pages(self.size)
        for one, parameter in members.items():
            self.layout[one] = (self.size, strides_of(parameter))
            self.size += -(-parameter.numel() * parameter.element_size() // LINE) * LINE
        self.regions[region], self.sizes[region] = begin, self.size - begin

    def place(self, one: str) -> tuple[str, int, tuple[int, ...]]:
        """Where a weight is on disk: its region, the first byte in it, and the strides."""
        offset, stride = self.layout[one]
        region, begin = next((region, begin) for region, begin in reversed(self.regions.items()) if begin <= offset)
        return region, offset - begin, stride

    def in_buffer(self, one: str) -> Tensor:
        """A weight in the buffer."""
        assert self.buffer is not None, "only a unit in memory has a buffer"
        offset, stride = self.layout[one]
        return self.buffer.part(offset, self.members[one].dtype, self.members[one].shape, stride)


def stream_units(run: Run, names: Mapping[nn.Parameter, str]) -> tuple[list[StreamUnit], dict[nn.Module, nn.Parameter]]:
    """The model's units in the order they run, and the modules whose weight is split by rows, with that weight."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    inside: set[nn.Module] = set()
    for block in run.blocks.values():
        for parameter in block.parameters():
            owners.setdefault(parameter, []).append(block)
        inside.update(block.modules())
    outside = [module for module in run.model.modules() if module not in inside and own_parameters(module)]
    for module in outside:
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    units = []
    for name, block in run.blocks.items():
        members = {names[parameter]: parameter for parameter in block.parameters() if len(owners[parameter]) == 1}
        if members:
            units.append(StreamUnit(name, block, members))
    largest = max((unit.size for unit in units), default=0)
    split: dict[nn.Module, nn.Parameter] = {}
    for module in outside:
        large = {
            names[one]: one for one in module.parameters(recurse=False) if one.numel() >= offloaded_optimizer.SMALL
        }
        weight = module.weight if can_be_split(module) and in_parts(run) else None
        if (
            isinstance(weight, nn.Parameter)
            and names[weight] in large
            and all(map(can_be_split, owners[weight]))
            and not has_gradient_hooks(weight)  # the gradients of row ranges pass by autograd
            and (len(owners[weight]) > 1 or weight.numel() * weight.element_size() > largest)
        ):
            split[module] = weight
        elif large and all(len(owners[one]) == 1 for one in large.values()) and not list(module.children()):
            name = next(name for name, other in run.model.named_modules() if other is module)
            units.append(StreamUnit(name, module, large))
    return in_order(run.model, units), split


def in_order(model: nn.Module, units: list[StreamUnit]) -> list[StreamUnit]:
    """Units in the order of the module tree."""
    positions = {module: number for number, module in enumerate(model.modules())}
    return sorted(units, key=lambda unit: positions[unit.module])
