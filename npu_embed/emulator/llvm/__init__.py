"""The arithmetic of the emulated array as machine code, made by LLVM when it is first wanted.

numpy does the same where llvmlite is not installed (it comes with the extra `fast`), or where the
processor is none of those in `registers`.
"""
