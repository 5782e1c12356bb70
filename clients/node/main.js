// Creates a rollout, leases it, completes it, and sees it in the feed of finished groups.
//
//   FULMEN_STORE_TARGET=127.0.0.1:7101 FULMEN_TOKEN=... node main.js
//
// Prints one JSON object; exits 1 with the status code of the failed call.

import grpc from "@grpc/grpc-js";

import { call, connect } from "./src/connect.js";
import { runAttempts } from "./src/runner.js";

const DEADLINE_MS = 30_000;
const TASK = { question: "6*7=" };

function agent(task) {
  const [left, right] = task.question.slice(0, -1).split("*").map(Number);
  return { reward: 1, output: { answer: left * right } };
}

/** Reads the feed until it names the rollout; every message is handled before the next one is read. */
function awaitFinished(store, name) {
  return new Promise((resolve, reject) => {
    const stream = store.rollouts.WatchRollouts({}, store.metadata(), { deadline: Date.now() + DEADLINE_MS });
    stream.on("error", (error) => error.code !== grpc.status.CANCELLED && reject(error));
    stream.on("data", ({ groups }) => {
      const found = groups.flatMap((group) => group.rollouts).find((rollout) => rollout.name === name);
      if (!found) return;
      stream.cancel();
      resolve(found);
    });
  });
}

async function main() {
  const store = connect(process.env.FULMEN_STORE_TARGET ?? "127.0.0.1:7101", process.env.FULMEN_TOKEN ?? "");
  try {
    const request = { rollouts: [{ input: Buffer.from(JSON.stringify(TASK)) }] };
    const created = await call(store.rollouts, "BatchCreateRollouts", request, store.metadata(), DEADLINE_MS);
    const { name } = created.rollouts[0];
    const { sessionId, acks } = await runAttempts(store, { count: 1, deadlineMs: DEADLINE_MS }, agent);
    const finished = await awaitFinished(store, name);
    const [attempt] = finished.attempts;
    console.log(
      JSON.stringify({
        name,
        sessionId,
        acks,
        state: finished.state,
        reward: attempt.rewards[0].value,
        output: JSON.parse(attempt.output.toString("utf8")),
      }),
    );
  } finally {
    store.close();
  }
}

main().catch((error) => {
  console.error(`${grpc.status[error.code] ?? "ERROR"}: ${error.details ?? error.message}`);
  process.exitCode = 1;
});
