from __future__ import annotations

import gc
import threading

import torch

from planner.cpu.meter import Meter


def test_a_storage_counts_once_however_many_tensors_see_it():
    meter = Meter()
    with meter.watch():
        a = torch.ones(100)
        b = a.view(10, 10).t()[2:]
        assert meter.now == 400
        del a
        assert meter.now == 400
        del b
    assert meter.now == 0
    assert meter.peak == 400


def test_the_peak_is_the_most_alive_at_once():
    meter = Meter()
    with meter.watch():
        for _ in range(5):
            x = torch.ones(100)
            x + 1
        del x
    assert meter.peak == 800  # the old x while the new one is made; x and its sum


def test_a_mark_gives_the_peak_since_the_last_mark():
    meter = Meter()
    with meter.watch():
        big = torch.ones(1000)
        meter.mark()
        del big
        small = torch.ones(10)
        assert meter.mark() == 4000
        assert meter.mark() == 40
        meter.mark(alive=False)
        assert meter.mark() == 0
        meter.mark(alive=False)
        del small
        torch.ones(20)
        assert meter.mark() == 80
        meter.reset_peak()
        assert meter.peak == 0


def test_host_memory_does_not_count_even_after_the_host_context_has_ended():
    meter = Meter()
    with meter.watch():
        with meter.host():
            parked = torch.ones(100)
        assert meter.now == 0
        view = parked[10:]
        assert meter.now == 0
        sums = view + 1
        assert meter.now == 360
        assert meter.bytes_of(sums) == 360
        assert meter.bytes_of(parked) == 0


def test_the_host_context_of_one_thread_leaves_the_others_alone():
    meter = Meter()
    inside, made = threading.Event(), threading.Event()
    kept = []

    def compute():
        inside.wait()
        with meter.watch():
            kept.append(torch.ones(100))
        made.set()

    thread = threading.Thread(target=compute)
    thread.start()
    with meter.watch(), meter.host():
        inside.set()
        made.wait()
        kept.append(torch.ones(100))
    thread.join()
    assert meter.now == 400


def test_threads_share_the_counts_and_none_is_lost():
    meter = Meter()

    def compute():
        with meter.watch():
            for _ in range(300):
                torch.ones(10) + 1

    threads = [threading.Thread(target=compute) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert meter.now == 0


def test_a_thread_without_a_watch_counts_nothing():
    meter = Meter()
    with meter.watch():
        thread = threading.Thread(target=lambda: torch.ones(100))
        thread.start()
        thread.join()
    assert meter.peak == 0


def test_other_devices_do_not_count():
    meter = Meter()
    with meter.watch():
        torch.ones(100, device="meta")
    assert meter.peak == 0
