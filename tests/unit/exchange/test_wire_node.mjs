// Decodes exchanged gradients with the client for Node, which was made from docs/exchange-wire.md and the .proto files.
//
//   node test_wire_node.mjs < payloads
//
// Reads a line of JSON for each payload: {payload: hexadecimal, codec, version, size, bits}; prints one for each:
// {decoded: [[place, value], ...]} of what is not zero, or {refused: why}.

import readline from "node:readline";

import { decode, Refused } from "../../../clients/node/build/js/src/payload.js";

function answer({ payload, ...expected }) {
  try {
    return { decoded: decode(Buffer.from(payload, "hex"), expected) };
  } catch (error) {
    if (error instanceof Refused) return { refused: error.message };
    throw error;
  }
}

for await (const line of readline.createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(answer(JSON.parse(line))));
}
