"""``on_error``: what a save says of earlier saves that failed unseen."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest
import torch
from torch_spawned import run_ranks

import groupio
import groupio.torch as gt

STATE = {"w": torch.ones(9)}


def fail_unseen(store: str, caplog: pytest.LogCaptureFixture) -> None:
    gt.save(STATE, store, step=20).wait()
    handle = gt.save(STATE, store, step=10)
    with pytest.raises(groupio.StaleEpoch):
        handle._wait("durable", 30)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_log_is_the_default(store: str, caplog: pytest.LogCaptureFixture) -> None:
    fail_unseen(store, caplog)
    handle = gt.save(STATE, store, step=30)
    assert "epoch 10 was not saved" in caplog.text
    assert any("epoch 10" in note for note in handle.times.notes)
    handle.wait()


def test_warn_warns_once_in_place_of_the_log(store: str, caplog: pytest.LogCaptureFixture) -> None:
    fail_unseen(store, caplog)
    with pytest.warns(RuntimeWarning, match="epoch 10 was not saved") as seen:
        gt.save(STATE, store, step=30, on_error="warn").wait()
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gt.save(STATE, store, step=31, on_error="warn").wait()
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_raise_raises_once_and_saves_nothing(store: str, caplog: pytest.LogCaptureFixture) -> None:
    fail_unseen(store, caplog)
    with pytest.raises(groupio.StaleEpoch, match="epoch 10 was not saved: rank 0"):
        gt.save(STATE, store, step=30, on_error="raise")
    gt.save(STATE, store, step=31, on_error="raise").wait()
    assert gt.load({"w": torch.zeros(9)}, store).step == 31
    with pytest.raises(groupio.NotFound):
        gt.load({"w": torch.zeros(9)}, store, step=30)
    # The step that failed fails again: that is another failure.
    again = gt.save(STATE, store, step=10)
    with pytest.raises(groupio.StaleEpoch):
        again._wait("durable", 30)
    with pytest.raises(groupio.StaleEpoch, match="epoch 10 was not saved"):
        gt.save(STATE, store, step=32, on_error="raise")


def test_raise_raises_on_all_ranks_alike(tmp_path: Path) -> None:
    zero, one = run_ranks(Path(__file__).parent / "on_error_worker.py", tmp_path, 2, (0, 0))
    assert zero == one
    assert zero["first"] == zero["again"] == zero["late"] == ""
    assert zero["raised"].startswith("StaleEpoch: epoch 150 was not saved: rank 1:")
    assert (
        zero["alone"] == "AgentLost: epoch 7 was not saved: rank 1: only rank 1 knows; save again"
    )
    assert zero["durable"] == 203


def test_another_word_is_refused(store: str) -> None:
    with pytest.raises(groupio.InvalidInput, match="log, warn, raise"):
        gt.save(STATE, store, step=1, on_error="ignore")
