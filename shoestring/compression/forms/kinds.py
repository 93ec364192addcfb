"""All kinds of forms, by the name that a manifest has for them. A new one is one file, and one line here."""
from __future__ import annotations

from shoestring.compression.forms.codebook import Codebook
from shoestring.compression.forms.form import Form, Plain
from shoestring.compression.forms.grid import Grid
from shoestring.compression.forms.int8 import Int8
from shoestring.compression.forms.product import Product
from shoestring.compression.forms.sparse import Sparse

FORMS: tuple[type[Form], ...] = (Plain, Grid, Int8, Codebook, Product, Sparse)
KINDS = {one.kind: one for one in FORMS}
