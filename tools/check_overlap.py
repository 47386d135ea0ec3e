#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads a timeline written by `finetune --trace` and says how much of the transfers ran beside compute.

Usage: check_overlap.py TIMELINE.json
Prints the share of gradient copies (d2h) that began during a backward, and of uploads (h2d) that ran during a forward
block; ends with 1 where either is none: then nothing overlaps.
"""
import json
import sys


def spans(events, tracks, track, name):
    wanted = {tid for tid, text in tracks.items() if text == track}
    return [(e["ts"], e["ts"] + e["dur"]) for e in events
            if e.get("ph") == "X" and e["tid"] in wanted and e["name"].startswith(name)]


def merged(intervals):
    out = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([begin, end])
    return out


def shared(interval, others):
    return sum(max(0.0, min(interval[1], end) - max(interval[0], begin)) for begin, end in others)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    document = json.load(open(sys.argv[1], encoding="utf-8"))
    events = document["traceEvents"] if isinstance(document, dict) else document
    tracks = {e["tid"]: e["args"]["name"] for e in events if e.get("ph") == "M" and e["name"] == "thread_name"}
    backward = merged(spans(events, tracks, "engine", "backward"))
    forward = merged(spans(events, tracks, "forward", "forward block"))
    down = spans(events, tracks, "d2h", "gradients down")
    up = spans(events, tracks, "h2d", "parameters up")
    began = sum(any(begin <= d[0] < end for begin, end in backward) for d in down)
    beside = sum(shared(u, forward) > 0 for u in up)
    print(f"gradient copies that began during a backward: {began} of {len(down)}")
    print(f"uploads that ran during a forward block: {beside} of {len(up)}")
    sys.exit(0 if began and beside else 1)


if __name__ == "__main__":
    main()
