"""A replica: a process with one thread that computes batches, one after the other, until its line is closed.

A batch that fails is computed again one sample at a time, so that a sample which the model refuses harms nobody else. If
the engine answers a sample that it knows, the one that failed is wrong (400), else the engine is (500).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from shoestring.core.errors import error_sentence
from shoestring.serving.engines.engine import ServingEngine
from shoestring.serving.replicas.wire import BatchReply, SampleFailed, frame, read_batch, received_frame, reply_frame
from shoestring.serving.sample import Answers, Sample, Tensors


def be_replica(line: socket.socket, alive: int, engine: ServingEngine) -> NoReturn:
    """Answer until the front closes the line. `alive`: a pipe that ends when the front does, also in the middle of a batch."""
    threading.Thread(target=end_with, args=(alive,), daemon=True).start()
    try:
        with torch.inference_mode():
            send(line, frame({"ready": os.getpid()}, ()))
            while (found := received_frame(line)) is not None:
                number, samples = read_batch(*found)
                send(line, reply_frame(reply_to_batch(number, samples, engine)))
    except ConnectionError:
        pass  # the front is gone
    os._exit(0)


def end_with(alive: int) -> None:
    os.read(alive, 1)
    os._exit(1)


def send(line: socket.socket, pieces: Sequence[bytes | memoryview]) -> None:
    for piece in pieces:
        line.sendall(piece)


def reply_to_batch(
    number: int, samples: Sequence[Sample], engine: ServingEngine, clock: Callable[[], float] = time.perf_counter
) -> BatchReply:
    """The reply to a batch."""
    begun = clock()
    try:
        answers: Sequence[Tensors | SampleFailed] = check_count(engine.answers(samples), len(samples))
    except Exception:
        answers = [answered_alone(one, engine) for one in samples]
    return BatchReply(number, answers, clock() - begun)


def answered_alone(sample: Sample, engine: ServingEngine) -> Tensors | SampleFailed:
    try:
        return check_count(engine.answers([sample]), 1)[0]
    except Exception as error:
        return SampleFailed(error_sentence(error), is_well(engine))


def is_well(engine: ServingEngine) -> bool:
    """Whether the engine answers a sample that it knows. What a model raises for numbers and shapes that it does not take
    is its own: IndexError, RuntimeError, onnxruntime's InvalidArgument."""
    if engine.known is None:
        return False
    try:
        engine.answers([engine.known])
    except Exception:
        return False
    return True


def check_count(answers: Answers, count: int) -> Answers:
    if len(answers) != count:
        raise AssertionError(f"the engine gave {len(answers)} answers to {count} samples")
    return answers
