"""The outputs of a model by their names."""

from __future__ import annotations

from torch import Tensor


class NamedOutputs(dict[str, Tensor]):
    """A model's outputs, as `output["logits"]`, `output.logits` or `output[0]`."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the model gives no {name!r}; it gives {', '.join(self)}") from None

    def __getitem__(self, name: str | int) -> Tensor:
        return list(self.values())[name] if isinstance(name, int) else super().__getitem__(name)
