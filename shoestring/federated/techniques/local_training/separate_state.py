"""Extra training beside the round's own, such as that of personal models, must not change the state of other
techniques."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoestring.federated.round import DeviceView


def with_copied_state(devices: Sequence[DeviceView]) -> list[DeviceView]:
    """The same devices with a copy of their state: what the extra training writes to the copy does not reach the
    device."""
    return [replace(device, state=dict(device.state)) for device in devices]
