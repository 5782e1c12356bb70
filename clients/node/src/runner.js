// A runner in one function: holds the lease stream, works through assignments, reports them.

/**
 * Leases `count` attempts, runs `agent` on each and waits until the store has acknowledged every result.
 *
 * @param {ReturnType<import("./connect.js").connect>} store
 * @param {{count: number, deadlineMs: number}} options
 * @param {(input: unknown) => {reward: number, output: unknown}} agent
 * @returns {Promise<{sessionId: string, acks: {attempt: string, status: string}[]}>}
 */
export function runAttempts(store, { count, deadlineMs }, agent) {
  return new Promise((resolve, reject) => {
    const stream = store.leases.StreamLeases(store.metadata(), { deadline: Date.now() + deadlineMs });
    const acks = [];
    let sessionId = "";
    let renewal;
    let finished = false;

    const finish = () => {
      finished = true;
      clearInterval(renewal);
      stream.end();
      resolve({ sessionId, acks });
    };
    stream.on("error", (error) => {
      clearInterval(renewal);
      if (!finished) reject(error);
    });
    stream.on("end", () => {
      clearInterval(renewal);
      if (!finished) reject(new Error("the store closed the stream"));
    });
    stream.on("data", (response) => {
      switch (response.message) {
        case "opened":
          sessionId = response.opened.sessionId;
          renewal = setInterval(() => stream.write({ renew: {} }), milliseconds(response.opened.leaseTtl) / 3);
          stream.write({ demand: { creditCount: count } });
          break;
        case "assign":
          stream.write({ complete: { results: response.assign.assignments.map((a) => resultOf(a, agent)) } });
          break;
        case "ack":
          acks.push(...response.ack.acks.map(({ attempt, status }) => ({ attempt, status })));
          if (acks.length >= count) finish();
          break;
        default:
          break; // cancel, leaseLost and drain do not concern attempts that end at once
      }
    });
    stream.write({ open: { runner: { host: "node", version: "0.1.0", slotCount: count } } });
  });
}

function resultOf(assignment, agent) {
  const { reward, output } = agent(JSON.parse(assignment.rollout.input.toString("utf8")));
  return {
    attempt: assignment.attempt,
    leaseId: assignment.leaseId,
    epoch: assignment.epoch,
    rewards: [{ value: reward }],
    output: Buffer.from(JSON.stringify(output)),
    outputContentType: "application/json",
  };
}

function milliseconds(duration) {
  return Number(duration.seconds) * 1000 + duration.nanos / 1e6;
}
