"""Carry vLLM, LMCache and kvcliff to a GPU box that can reach nothing, and measure there.

``python -m scripts.gpu_kit pack --out DIR`` builds a kit of at most 64 MiB from the package index;
``python3 KIT/box.py run --out OUT`` on the box unpacks it, tries its kernels and runs the paired
experiment. What the box must have is in ``box.txt``. Nothing here imports an engine, and what runs
on the box before the kit is unpacked needs the standard library alone.
"""
