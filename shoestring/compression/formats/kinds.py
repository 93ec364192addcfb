"""Registry of weight formats by their name in a manifest. A new format is one file, and one line here."""

from __future__ import annotations

from shoestring.compression.formats.codebook import CodebookFormat
from shoestring.compression.formats.format import PlainFormat, WeightFormat
from shoestring.compression.formats.grid import GridFormat
from shoestring.compression.formats.int8 import Int8Format
from shoestring.compression.formats.product import ProductFormat
from shoestring.compression.formats.sparse import SparseFormat

FORMATS: tuple[type[WeightFormat], ...] = (
    PlainFormat,
    GridFormat,
    Int8Format,
    CodebookFormat,
    ProductFormat,
    SparseFormat,
)
KINDS = {one.kind: one for one in FORMATS}
