"""Adapters: the engine behind the interfaces of other frameworks, a module each.

Nothing is imported here: `npu_embed.integrations.langchain` and its siblings each need the package
of the extra that has their name (`pip install 'npu-embed[langchain]'`), and say so without it.

What every adapter takes:
    bundle, device: as npu_embed.embed. What it names is opened when the first text is embedded,
        once a process for all adapters and for npu_embed.embed.
    embedder: an open Embedder instead of both; closing it stays with its owner.
    query_prompt, document_prompt: names of prompts of the bundle. None is its own prompt for
        queries (query) or for documents (document, passage or corpus), where it has one.
    dim, truncate: as Embedder.embed.

An adapter that is pickled or written to a file is its bundle's path and its options, no more:
where it is read, that folder must be there.
"""
