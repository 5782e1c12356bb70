// What is known of training runs, without calls.

import { create } from "@bufbuild/protobuf";
import { timestampFromDate } from "@bufbuild/protobuf/wkt";

import {
  PolicySpecSchema,
  TrainingRunSchema,
  TrainingRunState,
} from "../../api/gen/fulmen/algorithm/v1/training_run_pb";
import type { TrainingRun } from "../../api/gen/fulmen/algorithm/v1/training_run_pb";
import type { Tone } from "../../parts/Status.svelte";

/** Tones of states. */
export const TONES: Record<number, Tone> = {
  [TrainingRunState.PENDING]: "idle",
  [TrainingRunState.RUNNING]: "active",
  [TrainingRunState.PAUSED]: "warn",
  [TrainingRunState.SUCCEEDED]: "ok",
  [TrainingRunState.FAILED]: "bad",
  [TrainingRunState.CANCELLED]: "idle",
};

/** True if a run can still change by itself, or be resumed. */
export function isOpen(run: TrainingRun): boolean {
  return [TrainingRunState.PENDING, TrainingRunState.RUNNING, TrainingRunState.PAUSED].includes(run.state);
}

/** Reads the description of a run that its last owner left at the store; undefined if it is none. */
export function runOfRecord(record: Uint8Array): TrainingRun | undefined {
  try {
    const said = JSON.parse(new TextDecoder().decode(record)) as Record<string, unknown>;
    if (typeof said.name !== "string") return undefined;
    const time = (value: unknown) => (typeof value === "string" ? timestampFromDate(new Date(value)) : undefined);
    const policy = said.policy as { name?: string } | undefined;
    return create(TrainingRunSchema, {
      name: said.name,
      displayName: text(said.display_name),
      algorithm: text(said.algorithm),
      settingsJson: text(said.settings_json),
      policy: policy?.name ? create(PolicySpecSchema, { name: policy.name }) : undefined,
      inputs: (said.inputs ?? {}) as Record<string, string>,
      state: TrainingRunState[text(said.state) as keyof typeof TrainingRunState] ?? TrainingRunState.UNSPECIFIED,
      failureMessage: text(said.failure_message),
      step: BigInt(Number(said.step ?? 0)),
      stepCount: BigInt(Number(said.step_count ?? 0)),
      policyVersion: text(said.policy_version),
      promptVersion: text(said.prompt_version),
      results: (said.results ?? {}) as Record<string, number>,
      provenance: (said.provenance ?? {}) as Record<string, string>,
      tags: (said.tags ?? []) as string[],
      stages: (said.stages ?? []) as string[],
      createTime: time(said.create_time),
      startTime: time(said.start_time),
      endTime: time(said.end_time),
    });
  } catch {
    return undefined;
  }
}

function text(value: unknown): string {
  return typeof value === "string" ? value : "";
}

/** A value that runs do not share. */
export interface Difference {
  name: string;
  /** One per run; undefined where it has none. */
  values: (string | undefined)[];
}

/** Returns what was given to runs and is not the same for all: algorithm, settings, inputs, policy. */
export function differences(runs: TrainingRun[]): Difference[] {
  const facts = runs.map(givenTo);
  const names = [...new Set(facts.flatMap((each) => [...each.keys()]))];
  return names
    .map((name) => ({ name, values: facts.map((each) => each.get(name)) }))
    .filter(({ values }) => values.some((value) => value !== values[0]));
}

/** Returns what was given to a run, by name: settings of settings as `engine.kind`. */
export function givenTo(run: TrainingRun): Map<string, string> {
  const found = new Map([
    ["algorithm", run.algorithm],
    ["policy", run.policy?.name ?? ""],
  ]);
  for (const [name, value] of flat(parsed(run.settingsJson))) found.set(name, value);
  for (const [use, version] of Object.entries(run.inputs).sort()) found.set(`input ${use}`, version);
  return found;
}

function parsed(json: string): unknown {
  try {
    return JSON.parse(json || "{}");
  } catch {
    return {};
  }
}

function flat(value: unknown, prefix = ""): [string, string][] {
  if (typeof value !== "object" || value === null || Array.isArray(value)) return [[prefix, JSON.stringify(value)]];
  return Object.entries(value)
    .sort(([a], [b]) => (a < b ? -1 : 1))
    .flatMap(([name, each]) => flat(each, prefix ? `${prefix}.${name}` : name));
}
