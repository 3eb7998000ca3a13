// Perfetto's engine, which its page runs as a worker, on stdin and stdout.
//
//   node perfetto_engine.js FOLDER
//
// FOLDER holds engine_bundle.js and the trace_processor*.wasm it loads. Each request is a length
// (4 bytes, little endian) and so many bytes of a TraceProcessorRpcStream; answers are written as
// they come.
"use strict";

const fs = require("fs");
const path = require("path");
const vm = require("vm");

const folder = process.argv[2];
const say = (...words) => fs.writeSync(2, words.join(" ") + "\n");
const print = { log: say, warn: say, error: say, info: say, debug: say };

// What the engine's loader asks of a worker: it must not find out that this is node.
class XMLHttpRequest {
  open(_method, url) {
    this.file = path.join(folder, path.basename(String(url)));
  }
  send() {
    const bytes = fs.readFileSync(this.file);
    this.status = 200;
    this.response = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
  }
}

const answer = (bytes) => {
  for (let done = 0; done < bytes.length; ) done += fs.writeSync(1, bytes, done);
};
const port = { postMessage: answer, onmessage: undefined };

Object.assign(globalThis, {
  self: globalThis,
  WorkerGlobalScope: class {},
  XMLHttpRequest,
  location: { href: "http://engine/engine_bundle.js" },
  console: print,
  process: undefined,
});
const bundle = path.join(folder, "engine_bundle.js");
vm.runInThisContext(fs.readFileSync(bundle, "utf8"), { filename: bundle });

function requests() {
  const length = Buffer.alloc(4);
  const read = (into) => {
    let done = 0;
    while (done < into.length) {
      const more = fs.readSync(0, into, done, into.length - done, null);
      if (more === 0) return false;
      done += more;
    }
    return true;
  };
  while (read(length)) {
    const request = Buffer.alloc(length.readUInt32LE(0));
    if (!read(request)) break;
    port.onmessage({ data: new Uint8Array(request) });
  }
}

self.onmessage({ data: port });
// The engine is ready in a turn or two of the loop after its wasm is compiled.
setTimeout(requests, 0);
