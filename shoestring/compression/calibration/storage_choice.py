"""A storage option of a weight. All options together are larger than the model, so formats are made on demand and kept
in a scratch file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoestring.compression.calibration.scratch import Scratch, ScratchTensor
from shoestring.compression.formats.format import WeightFormat
from shoestring.compression.formats.kinds import KINDS
from shoestring.compression.formats.manifest import Stored


@dataclass
class StorageChoice:
    """A storage option of a weight, whose format is made on demand."""

    stored: Stored
    error: float  # estimated
    make: Callable[[], WeightFormat]
    scratch: Scratch | None = None  # the file in which the format is kept once it was made
    parts: dict[str, ScratchTensor] | None = None

    @property
    def form(self) -> WeightFormat:
        if self.parts is None or self.scratch is None:
            form = self.make()
            self.put_aside(form)
            return form
        tensors = {name: self.scratch.read(place) for name, place in self.parts.items()}
        return KINDS[self.stored.kind](self.stored.shape, self.stored.dtype, self.stored.settings, tensors)

    def put_aside(self, form: WeightFormat) -> None:
        """From now on read the format from the file; the function that made it is dropped, with all that it references."""
        if self.scratch is not None:
            self.parts = {name: self.scratch.keep(tensor) for name, tensor in form.tensors().items()}
            self.make = refuse_to_make


def refuse_to_make() -> WeightFormat:
    raise AssertionError("a form that was put aside is read, not made again")
