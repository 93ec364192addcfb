"""A way to store a weight. All ways of all weights are larger than the model, so forms are made when they are needed, and lie in a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoestring.compression.calibration.scratch import Scratch, ScratchTensor
from shoestring.compression.formats.format import WeightFormat
from shoestring.compression.formats.kinds import KINDS
from shoestring.compression.formats.manifest import Stored


@dataclass
class StorageChoice:
    """A way to store a weight, whose form is made when it is needed."""

    stored: Stored
    error: float  # estimated
    make: Callable[[], WeightFormat]
    scratch: Scratch | None = None  # where it lies once it was made: all ways of all weights are larger than the model
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
        """Read it from the file from now on; what made it is given up, with all that it holds."""
        if self.scratch is not None:
            self.parts = {name: self.scratch.keep(tensor) for name, tensor in form.tensors().items()}
            self.make = given_up


def given_up() -> WeightFormat:
    raise AssertionError("a form that was put aside is read, not made again")
