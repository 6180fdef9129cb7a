"""Threads that share the cores out among them, each with torch threads of its own. Imports torch."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

__all__ = ["pool_on_cores"]


def pool_on_cores(threads: int, cores_each: int, *, name: str) -> ThreadPoolExecutor:
    """Begin threads in each of which torch computes on so many cores; elsewhere its setting stays.

    Args:
        threads: How many.
        cores_each: Torch threads inside each.
        name: What the threads' names begin with.
    """

    def share_cores() -> None:
        torch.set_num_threads(cores_each)
        torch.get_num_threads()  # a thread takes the common setting, whatever it is then, when it first asks

    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=share_cores)
    # Threads begun later, and those that have not yet asked, start with the last setting made. So let them all begin, and
    # make the old one again.
    begun = threading.Barrier(threads + 1)
    for _ in range(threads):
        pool.submit(begun.wait)
    begun.wait()
    torch.set_num_threads(before)
    return pool
