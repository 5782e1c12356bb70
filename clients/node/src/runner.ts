// A runner: holds the lease stream, runs the attempts that it is assigned, and reports their results. Everything here
// happens in one thread, so the fields below are always consistent between two messages.

import { hostname } from "node:os";

import type { Assignment, AttemptResult, CompletionAck } from "../build/gen/fulmen/store/v1/lease.js";
import { ReleaseLeasesRequest, StreamLeasesRequest } from "../build/gen/fulmen/store/v1/lease_service.js";
import type { SessionOpened, StreamLeasesResponse } from "../build/gen/fulmen/store/v1/lease_service.js";
import { attempted } from "./agent.js";
import { call, whileUnavailable, type Connection } from "./connection.js";
import { decoded, FulmenError } from "./errors.js";
import type { Emit, Options } from "./main.js";

const RELEASE_LIMIT_MS = 5_000;

type Message = NonNullable<StreamLeasesRequest["message"]>;

export class Runner {
  private name = "";
  private handled = 0; // attempts that are acknowledged or lost
  private credits = 0; // granted and not yet used by an assignment
  private readonly running = new Map<string, AbortController>();
  private readonly unacknowledged = new Map<string, AttemptResult>();
  private send: (message: Message) => void = () => {};

  constructor(
    private readonly store: Connection,
    private readonly options: Options,
    private readonly emit: Emit,
  ) {}

  /** Works until `count` attempts are handled. The session outlives its streams: leases survive a reconnect. */
  async run() {
    try {
      while (this.handled < this.options.count) await whileUnavailable(this.store.deadline, () => this.holdStream());
    } finally {
      this.running.forEach((stop) => stop.abort());
      await this.endSession();
    }
  }

  private async holdStream() {
    const { store } = this;
    const stream = store.leases.streamLeases(store.metadata, { deadline: store.deadline });
    let renewal: NodeJS.Timeout | undefined;
    this.send = (message) => stream.write(StreamLeasesRequest.fromPartial({ message }));
    try {
      this.open();
      for await (const { message } of stream) {
        if (message?.$case === "opened") renewal = this.opened(message.value);
        else this.take(message);
        if (message?.$case === "drain" || this.handled >= this.options.count) {
          this.send = () => {}; // attempts that end from here on are reported on the next stream
          stream.end(); // the store answers by ending its side
        } else this.grant();
      }
    } catch (cause) {
      const error = decoded(cause);
      if (!(error instanceof FulmenError && error.reason === "SESSION_ENDED")) throw error;
      this.forgetSession();
    } finally {
      clearInterval(renewal);
      this.send = () => {};
    }
  }

  private opened({ runner, leaseTtl, lostAttempts }: SessionOpened) {
    const ttlS = Number(leaseTtl!.seconds) + leaseTtl!.nanos / 1e9;
    this.emit({ event: "opened", runner, resumed: runner === this.name, lease_ttl_s: ttlS });
    this.name = runner;
    this.lose(lostAttempts);
    this.report([...this.unacknowledged.values()]);
    return setInterval(() => this.send({ $case: "renew", value: { load: undefined, progress: [], doneOrder: 0n } }), (ttlS * 1000) / 3);
  }

  private take(message: StreamLeasesResponse["message"]) {
    switch (message?.$case) {
      case "assign":
        return message.value.assignments.forEach((one) => this.start(one));
      case "ack":
        return message.value.acks.forEach((ack) => this.acknowledge(ack));
      case "cancel":
        return this.cancel(message.value.attempts);
      case "leaseLost":
        return this.lose(message.value.attempts);
      case "drain":
        return this.emit({ event: "drain" });
    }
  }

  private open() {
    const { slots, project, labels } = this.options;
    const info = { host: hostname(), version: "node", labels, slotCount: slots, address: "" };
    const runningAttempts = [...this.running.keys(), ...this.unacknowledged.keys()];
    this.credits = 0; // credits do not survive a stream
    this.send({ $case: "open", value: { runner: this.name, info, runningAttempts, projects: [project] } });
  }

  /** Grants credits for places that are free, and never for more attempts than are still wanted. */
  private grant() {
    const { slots, count } = this.options;
    const held = this.running.size + this.unacknowledged.size;
    const creditCount = Math.min(slots, count - this.handled) - held - this.credits;
    if (creditCount <= 0) return;
    this.credits += creditCount;
    this.send({ $case: "addCredits", value: { creditCount } });
  }

  private start(assignment: Assignment) {
    const { attempt } = assignment;
    const stop = new AbortController();
    this.credits -= 1;
    this.running.set(attempt, stop);
    this.emit({ event: "assigned", attempt });
    void attempted(this.store, assignment, this.options, stop.signal).then((result) => {
      if (this.running.get(attempt) !== stop) return; // lost meanwhile: the result is discarded
      this.running.delete(attempt);
      this.unacknowledged.set(attempt, result);
      this.report([result]);
    });
  }

  private report(results: AttemptResult[]) {
    if (results.length) this.send({ $case: "complete", value: { results, creditCount: 0 } });
  }

  private acknowledge({ attempt, status, message }: CompletionAck) {
    if (!this.unacknowledged.delete(attempt)) return;
    this.handled += 1;
    this.emit({ event: "acknowledged", attempt, status, message });
  }

  /** Stops attempts whose rollouts were cancelled; each ends as CANCELLED and is reported like any other. */
  private cancel(attempts: string[]) {
    for (const attempt of attempts.filter((one) => this.running.has(one))) {
      this.emit({ event: "cancel", attempt });
      this.running.get(attempt)!.abort();
    }
  }

  /** Forgets attempts whose leases have expired: the store would discard their results. */
  private lose(attempts: string[]) {
    for (const attempt of attempts) {
      this.running.get(attempt)?.abort();
      if (!this.running.delete(attempt) && !this.unacknowledged.delete(attempt)) continue;
      this.handled += 1;
      this.emit({ event: "lease_lost", attempt });
    }
  }

  private forgetSession() {
    this.emit({ event: "session_ended", runner: this.name });
    this.running.forEach((stop) => stop.abort());
    this.running.clear();
    this.unacknowledged.clear();
    this.name = "";
  }

  /** Releases the remaining leases, so that rollouts need not wait until the session expires. */
  private async endSession() {
    if (!this.name) return;
    const { leases, metadata } = this.store;
    const request = ReleaseLeasesRequest.fromPartial({ runner: this.name });
    const deadline = new Date(Date.now() + RELEASE_LIMIT_MS);
    // If this fails, the session expires later.
    await call(leases, leases.releaseLeases, request, metadata, { deadline }).catch(() => {});
  }
}
