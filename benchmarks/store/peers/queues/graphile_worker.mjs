// Graphile Worker: the same lines as child.py. `node graphile_worker.mjs install DSN`, or `run DSN LOAD SETTINGS`.
import { createInterface } from "node:readline";
import { createRequire } from "node:module";

// Packages are those of the queues' own environment, not of this folder.
const require = createRequire(process.env.PEERS_HOME + "/package.json");
const { Logger, makeWorkerUtils, run, runMigrations } = require("graphile-worker");
const { Pool } = require("pg");

const [action, dsn, load, settings] = process.argv.slice(2).map((text, index) => (index < 2 ? text : JSON.parse(text)));
const logger = new Logger(() => () => {});
const say = (value) => process.stdout.write(JSON.stringify(value) + "\n");

async function turn() {
  const { max_ahead: maxAhead, input } = settings;
  const pool = new Pool({ connectionString: dsn, max: settings.pool });
  pool.on("error", () => {});
  pool.on("connect", (client) => client.on("error", () => {}));
  const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
  let [created, finished, waiting] = [0, 0, []];
  const done = () => {
    finished += 1;
    if (created - finished <= maxAhead) waiting.splice(0).forEach((wake) => wake());
  };
  const utils = await makeWorkerUtils({ pgPool: pool, logger });
  const runner = await run({
    pgPool: pool,
    logger,
    noHandleSignals: true,
    taskList: { bench: async () => done() },
    preset: {
      worker: {
        concurrentJobs: settings.concurrency,
        localQueue: { size: settings.local_queue },
        completeJobBatchDelay: settings.complete_delay_ms,
        failJobBatchDelay: settings.complete_delay_ms,
        maxPoolSize: settings.pool,
      },
    },
  });
  say("ready");
  await lines.next();
  const deadline = performance.now() + load.seconds * 1000;
  const jobs = Array.from({ length: load.per_request }, () => ({ identifier: "bench", payload: input }));
  const produce = async () => {
    while (performance.now() < deadline) {
      if (load.per_request === 1) await utils.addJob("bench", input);
      else await utils.addJobs(jobs);
      created += load.per_request;
      if (created - finished > maxAhead) await new Promise((wake) => waiting.push(wake));
    }
  };
  await Promise.all(Array.from({ length: load.producers }, produce));
  say(created);
  while ((await lines.next()).value === "count") say(finished);
  await runner.stop();
  process.exit(0);
}

if (action === "install") await runMigrations({ connectionString: dsn, logger });
else await turn();
