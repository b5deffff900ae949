"""User histories out of an event table, without torch: who had done what strictly before each event.

Every event is a sample: its label is whether the user liked the item; its history are the user's events with a strictly earlier
timestamp (half of MovieLens-100K's events share their second with another of the same user, whose labels must not leak), the
latest `max_history` of them, with their like or dislike; the event itself ends the sequence with the action unknown. The first
80 % of all events in time are for training, the rest for evaluation.

`save` writes them as one folder of arrays, `open_folder` maps it into memory: a rank then reads what its own samples need and when they need it, the
start takes no time whatever the number of events, and ranks of a host share the pages.
"""
from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from runtime.prepare import Events
from runtime.quality import normalized_entropy

TRAIN_SHARE = 0.8
UNKNOWN, DISLIKE, LIKE = 0, 1, 2  # actions
# Pseudo-counts of the overall like-rate that a rate of few events is drawn towards.
SMOOTHING = 10.0
ABOUT = "about.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Histories:
    """Samples are event numbers 0..n-1 in time order; `num_train` of them are for training.

    begin, end: `(n,)`, a sample's history is `[begin, end)` of the arrays sorted by user, then time: `past_item`, `past_action`, `past_time`.
    user, item, label, time: `(n,)`; times are int64 seconds. statistics: `(n, 4)` fp32, known strictly before the event: log-odds of the
    user's and of the item's smoothed like-rate, and log(1 + count) of both, roughly centred.
    """

    begin: np.ndarray
    end: np.ndarray
    past_item: np.ndarray
    past_action: np.ndarray
    past_time: np.ndarray
    time: np.ndarray
    user: np.ndarray
    item: np.ndarray
    label: np.ndarray
    statistics: np.ndarray
    num_train: int
    num_users: int
    num_items: int

    def __len__(self) -> int:
        return len(self.user)

    @property
    def lengths(self) -> np.ndarray:
        """`(n,)` events of each sample's sequence, the candidate counted."""
        return self.end - self.begin + 1

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        """`lengths[samples]`, of a file's arrays only those."""
        return self.end[samples] - self.begin[samples] + 1

    def sequences(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`(items (T,), actions (T,), offsets (B + 1,))` of `samples` `(B,)`; the last event of each is the candidate, action
        unknown.
        """
        rows, offsets = self._rows(samples)
        items, actions, last = self.past_item[rows], self.past_action[rows], offsets[1:] - 1
        items[last], actions[last] = self.item[samples], UNKNOWN
        return items, actions, offsets

    def times(self, samples: np.ndarray) -> np.ndarray:
        """Int64 seconds of every event that `sequences` gives."""
        rows, offsets = self._rows(samples)
        times = self.past_time[rows]
        times[offsets[1:] - 1] = self.time[samples]
        return times

    def _rows(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(row of the past of every event, offsets); a candidate's row is 0, to be replaced."""
        begin, lengths = self.begin[samples], self.lengths_of(samples)
        offsets = np.zeros(len(samples) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        rows = np.arange(offsets[-1]) + np.repeat(begin - offsets[:-1], lengths)
        rows[offsets[1:] - 1] = 0
        return rows, offsets


def build(events: Events, *, max_history: int | None) -> Histories:
    """`max_history` None keeps the whole past. Raises ValueError below two events or with max_history < 1."""
    if len(events) < 2:
        raise ValueError(f"{events.origin}: {len(events)} events are too few to split in time")
    if max_history is not None and max_history < 1:
        raise ValueError(f"max_history must be >= 1, got {max_history}")
    num_train = int(len(events) * TRAIN_SHARE)
    rate = float(events.liked[:num_train].mean())
    by_user, user_start, user_before, user_likes = _causal(events.user, events)
    _, item_start, item_before, item_likes = _causal(events.item, events)
    begin = user_start if max_history is None else np.maximum(user_start, user_before - max_history)
    counts = np.stack([user_before - user_start, item_before - item_start])
    rates = (np.stack([user_likes, item_likes]) + SMOOTHING * rate) / (counts + SMOOTHING)
    rates = np.clip(rates, 1e-3, 1 - 1e-3)
    times = np.floor(events.timestamp).astype(np.int64)
    statistics = np.concatenate([_log_odds(rates) - _log_odds(rate), np.log1p(counts) - np.log1p(50.0)]).T.astype(np.float32)
    return Histories(begin=begin, end=user_before, past_item=events.item[by_user],
                     past_action=np.where(events.liked[by_user], LIKE, DISLIKE).astype(np.int64),
                     past_time=times[by_user], time=times,
                     user=events.user, item=events.item, label=events.liked.astype(np.float32),
                     statistics=np.ascontiguousarray(statistics), num_train=num_train, num_users=events.num_users,
                     num_items=events.num_items)


def save(histories: Histories, folder: Path | str, *, about: dict[str, Any]) -> None:
    """One array a file, and `about` (JSON-ready, what `open_folder` gives back). Through a temporary folder, which replaces an older one."""
    folder = Path(folder)
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    numbers = {}
    for field in dataclasses.fields(histories):
        value = getattr(histories, field.name)
        if isinstance(value, np.ndarray):
            np.save(temporary / f"{field.name}.npy", value)
        else:
            numbers[field.name] = value
    (temporary / ABOUT).write_text(json.dumps({"numbers": numbers, "about": about}))
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def open_folder(folder: Path | str) -> tuple[Histories, dict[str, Any]]:
    """What `save` wrote, its arrays mapped into memory, and `about`. Raises ValueError naming a folder that is none of its."""
    folder = Path(folder)
    try:
        told = json.loads((folder / ABOUT).read_text())
        names = [f.name for f in dataclasses.fields(Histories) if f.name not in told["numbers"]]
        arrays = {name: np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in names}
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder}: not a folder of `python -m runtime.prepare histories` ({error})") from error
    return Histories(**told["numbers"], **arrays), told["about"]


def _causal(key: np.ndarray, events: Events) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For every event: events of the same key with a strictly earlier time.

    Returns `(order (n,), start (n,), before (n,), likes (n,))`: `order` sorts events by key, then time; an event's earlier ones
    are `order[start:before]`, of which `likes` were liked.
    """
    order = np.lexsort((events.timestamp, key))
    keys, times = key[order], events.timestamp[order]
    new_key = np.concatenate([[True], keys[1:] != keys[:-1]])
    new_time = new_key | np.concatenate([[True], times[1:] != times[:-1]])
    places = np.arange(len(order))
    start_sorted = np.maximum.accumulate(np.where(new_key, places, 0))
    before_sorted = np.maximum.accumulate(np.where(new_time, places, 0))
    start, before = np.empty_like(order), np.empty_like(order)
    start[order], before[order] = start_sorted, before_sorted
    likes = np.concatenate([[0], np.cumsum(events.liked[order])])
    return order, start, before, likes[before] - likes[start]


def baselines(histories: Histories) -> dict[str, float]:
    """NE on the evaluation events of two predictors without a model.

    `item_mean`: the item's smoothed like-rate over the training events; `item_mean_user_rate`: that and the user's causal
    like-rate, their log-odds added (each relative to the overall rate).
    """
    cut = histories.num_train
    rate = float(histories.label[:cut].mean())
    likes = np.bincount(histories.item[:cut], weights=histories.label[:cut], minlength=histories.num_items)
    counts = np.bincount(histories.item[:cut], minlength=histories.num_items)
    item = ((likes + SMOOTHING * rate) / (counts + SMOOTHING))[histories.item[cut:]]
    labels = histories.label[cut:]
    both = _log_odds(item) + histories.statistics[cut:, 0].astype(np.float64)
    return {"item_mean": normalized_entropy(item, labels),
            "item_mean_user_rate": normalized_entropy(1 / (1 + np.exp(-both)), labels)}


def summarize(events: Events, *, max_history: int | None) -> dict[str, Any]:
    """JSON-ready facts of an event table: counts, split, baselines and the histogram of sequence lengths (candidate counted)."""
    histories = build(events, max_history=max_history)
    values, weights = np.unique(histories.lengths, return_counts=True)
    return {"origin": events.origin, "events": len(events), "users": events.num_users, "items": events.num_items,
            "train": histories.num_train, "evaluation": len(events) - histories.num_train,
            "like_rate": float(events.liked.mean()), "max_history": max_history, "baselines": baselines(histories),
            "lengths": {"values": values.tolist(), "weights": weights.tolist()}}


def _log_odds(p):
    return np.log(p) - np.log1p(-p)
