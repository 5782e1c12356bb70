// A run that is being written down.

import { create } from "@bufbuild/protobuf";

import type { Algorithm } from "../../api/gen/fulmen/algorithm/v1/algorithm_pb";
import { PolicySpecSchema, TrainingRunSchema } from "../../api/gen/fulmen/algorithm/v1/training_run_pb";
import type { TrainingRun } from "../../api/gen/fulmen/algorithm/v1/training_run_pb";
import { inWords } from "../../api/sentences";

/** What a person has written. */
export interface Draft {
  name: string;
  algorithm: string;
  /** Settings that differ from the defaults, as written: JSON, or a word. */
  settings: Record<string, string>;
  inputs: Record<string, string>;
  policy: string;
  origin: Origin;
  source: string;
}

export const ORIGINS = {
  newest: "its newest version",
  version: "a version",
  base: "a base",
  path: "a folder",
} as const;
export type Origin = keyof typeof ORIGINS;

export const EMPTY: Draft = {
  name: "",
  algorithm: "",
  settings: {},
  inputs: {},
  policy: "",
  origin: "newest",
  source: "",
};

/** Returns a value as JSON: what is no JSON is a text, so that words need no quotes. */
export function valueOf(written: string): unknown {
  try {
    return JSON.parse(written);
  } catch {
    return written;
  }
}

/** Returns the run to create. */
export function runOf(draft: Draft, project: string): TrainingRun {
  const written = Object.entries(draft.settings).filter(([, value]) => value.trim() !== "");
  const given = Object.entries(draft.inputs).filter(([, value]) => value.trim() !== "");
  const initial = draft.origin === "newest" ? undefined : { case: draft.origin, value: draft.source.trim() };
  return create(TrainingRunSchema, {
    project: `projects/${project}`,
    displayName: draft.name.trim(),
    algorithm: draft.algorithm,
    settingsJson: JSON.stringify(Object.fromEntries(written.map(([name, value]) => [name, valueOf(value.trim())]))),
    inputs: Object.fromEntries(given.map(([use, value]) => [use, value.trim()])),
    policy: draft.policy.trim()
      ? create(PolicySpecSchema, { name: draft.policy.trim(), ...(initial ? { initial } : {}) })
      : undefined,
  });
}

/** Returns a draft of the same run again; settings at their defaults are left out. */
export function draftOf(run: TrainingRun, algorithm: Algorithm | undefined): Draft {
  const settings = valueOf(run.settingsJson || "{}") as Record<string, unknown>;
  const defaults = new Map((algorithm?.settings ?? []).map(({ name, defaultJson }) => [name, defaultJson]));
  const own = Object.entries(settings).filter(([name, value]) => !sameJson(defaults.get(name), value));
  const { initial } = run.policy ?? {};
  return {
    name: run.displayName,
    algorithm: run.algorithm,
    settings: Object.fromEntries(own.map(([name, value]) => [name, JSON.stringify(value)])),
    inputs: { ...run.inputs },
    policy: run.policy?.name ?? "",
    origin: initial?.case && initial.case in ORIGINS ? (initial.case as Origin) : "newest",
    source: initial?.case && initial.case in ORIGINS ? String(initial.value) : "",
  };
}

function sameJson(written: string | undefined, value: unknown): boolean {
  return written !== undefined && JSON.stringify(valueOf(written)) === JSON.stringify(value);
}

/** Sorts problems, each `field: description`, to the places that they are about. */
export function byPlace(details: string[]): Map<string, string[]> {
  const found = new Map<string, string[]>();
  for (const detail of details) {
    const at = detail.indexOf(": ");
    const field = at > 0 ? detail.slice(0, at) : "";
    const place = /^(settings\.\w+|inputs\.\w+|policy|algorithm|display_name)/.exec(field)?.[0] ?? "";
    // What has no place of its own is told whole.
    found.set(place, [...(found.get(place) ?? []), place ? detail.slice(at + 2) : inWords(detail)]);
  }
  return found;
}
