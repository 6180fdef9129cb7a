from __future__ import annotations

import threading
import time

import pytest
import torch

from probe_service.similarity import in_turn


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_results_come_in_order_from_threads_of_one_thread_each(threads):
    def work(number):
        time.sleep(0.002 * (number % 3))
        return number, torch.get_num_threads()

    assert list(in_turn(work, range(40))) == [(number, 1) for number in range(40)]
    assert torch.get_num_threads() == threads


def test_work_may_have_work_of_its_own(threads):
    def work(number):
        return sum(in_turn(lambda each: each * number, range(5)))

    assert list(in_turn(work, range(20))) == [10 * number for number in range(20)]


def test_whoever_leaves_early_waits_for_what_was_begun_and_begins_no_more(threads):
    begun, ended, lock = [], [], threading.Lock()

    def work(number):
        with lock:
            begun.append(number)
        time.sleep(0.005)
        with lock:
            ended.append(number)

    for done, _ in enumerate(in_turn(work, range(1_000))):
        if done == 2:
            break
    known = len(begun)
    assert known < 20
    time.sleep(0.05)
    assert sorted(begun) == sorted(ended)
    assert len(begun) == known


def test_what_the_work_raises_is_raised(threads):
    def work(number):
        if number == 7:
            raise KeyError(number)
        return number

    with pytest.raises(KeyError):
        list(in_turn(work, range(1_000)))
