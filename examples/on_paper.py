"""A cluster that nobody here has: how 1,024 GPUs would train GPT-3, and how fast."""

from shoestring.training.on_paper.best_mesh import best_mesh
from shoestring.training.on_paper.machines import Machines
from shoestring.training.on_paper.step import PaperJob
from shoestring.training.on_paper.transformer import Transformer

gpt3 = Transformer(hidden=12_288, layers=96, heads=96, vocabulary=51_200, sequence=2048)
a100 = Machines(
    memory=80e9,
    bandwidth=2.039e12,
    devices=8,  # bytes, bytes per second, GPUs a machine
    link=240e9,
    latency=3.4e-6,  # between GPUs of a machine
    network=25e9,
    network_latency=9.6e-6,  # of each GPU to other machines
    base=1.5e9,
    peak={"bf16": 312e12},
    efficiency={"bf16": 0.65},  # efficiency: the one number that no data sheet states
)
plan = best_mesh(PaperJob(gpt3, batch=1536), world=1024, machines=a100)
days = 300e9 / (1536 * 2048) * plan.chosen.parts.total / 86_400
print(plan.why())
print(f"300 billion tokens in {days:.0f} days")
