// Tokens in words, and what a new one needs.

import { timestampDate } from "@bufbuild/protobuf/wkt";

import { type TokenInfo, TokenRole } from "../../api/gen/fulmen/store/v1/project_service_pb";
import type { Tone } from "../../parts/Status.svelte";

/** Roles that people and services get; those of machines of a run are issued by the run. */
export const ROLES: Record<string, { text: string; about: string; value: TokenRole }> = {
  client: { text: "Client", about: "people and tools: rollouts, resources, runs, scores", value: TokenRole.CLIENT },
  reader: { text: "Reader", about: "sees everything, changes nothing", value: TokenRole.READER },
  runner: { text: "Runner", about: "runners", value: TokenRole.RUNNER },
  service: { text: "Service", about: "the algorithm service and the proxy", value: TokenRole.SERVICE },
  admin: { text: "Admin", about: "everything, also tokens and the audit log", value: TokenRole.ADMIN },
};

export const LIFETIMES: Record<string, { text: string }> = {
  "1": { text: "1 day" },
  "30": { text: "30 days" },
  "90": { text: "90 days" },
  "365": { text: "1 year" },
};

/** Whether a token can be used. */
export function stateOf(token: TokenInfo, now: Date): { tone: Tone; text: string } {
  if (token.revokeTime) return { tone: "idle", text: "revoked" };
  if (token.expireTime && timestampDate(token.expireTime) <= now) return { tone: "idle", text: "expired" };
  return { tone: "ok", text: "valid" };
}
