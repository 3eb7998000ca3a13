"""python -m npu_embed: the command line."""

from .cli import main

main(prog_name="npu-embed")
