"""A queue of work for the cores: no core waits for another one to finish its share."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch
from threadpoolctl import ThreadpoolController

from probe_service.cores import pool_on_cores

__all__ = ["alone", "in_turn"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_turn(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield the results of work on each item, in the order of the items.

    As many threads as torch would use take the next item each as soon as they are free; inside, torch and numpy work on one
    thread. Few results wait at a time. Leaving the iterator early, by an exception or otherwise, ends the work at the items
    begun.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield from map(work, items)
        return
    running: deque[Future[Result]] = deque()
    # numpy's threads are one pool for the whole process: two cores that both ask for it wait for each other.
    with _controller().limit(limits=1, user_api="blas"):
        try:
            for item in items:
                running.append(_pool(threads).submit(work, item))
                if len(running) > 2 * threads:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            begun = [each for each in running if not each.cancel()]
            for each in begun:
                each.exception()


def alone(work: Callable[[], Result]) -> Result:
    """Return the result of work on one core.

    Short operations on many are slower than on one: they end when the last core does, and that one may be at something else.
    """
    return next(in_turn(lambda _: work(), [None]))


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return pool_on_cores(threads, 1, name="search")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not live on in a child
