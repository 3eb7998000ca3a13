"""The server: an engine in a process of its own, and HTTP in front of it.

    messages   what the two processes say to each other
    worker     the engine's process            link        the server's end of the pipe to it
    queue      who waits, and what runs next   dispatcher  from the queue to the worker and back
    prepare    a request's body to token ids   service     from a request to its vectors
    openai_api, tei_api                        the two forms of requests, answers and errors
    app, connection, run                       routes; stalled clients; listening, draining

The engine is apart because a wait on a real NPU holds Python's lock: a thread that waits would
stop the server. Nothing is imported here, so that the worker does without the HTTP packages.
"""
