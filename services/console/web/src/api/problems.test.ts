import { create } from "@bufbuild/protobuf";
import { Code, ConnectError } from "@connectrpc/connect";
import { expect, test } from "vitest";

import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb";
import { type Next, PageError, problemOf, rememberCall } from "./problems";
import { inWords, permissionWords, plain } from "./sentences";

interface Given {
  said?: string;
  reason?: string;
  metadata?: Record<string, string>;
  violations?: [string, string][];
  retryS?: number;
  call?: [string, string];
  next?: Next;
}

const LIST: [string, string] = ["fulmen.store.v1.RolloutService", "ListRollouts"];

function shown(code: Code, { said = "", reason, metadata = {}, violations, retryS, call = LIST, next }: Given = {}) {
  const error = new ConnectError(said, code, undefined, [
    ...(reason === undefined ? [] : [{ desc: ErrorInfoSchema, value: { reason, metadata } }]),
    ...(violations
      ? [
          {
            desc: BadRequestSchema,
            value: create(BadRequestSchema, {
              fieldViolations: violations.map(([field, description]) => ({ field, description })),
            }),
          },
        ]
      : []),
    ...(retryS ? [{ desc: RetryInfoSchema, value: { retryDelay: { seconds: BigInt(retryS) } } }] : []),
  ]);
  rememberCall(error, ...call);
  return problemOf(error, next);
}

const REFUSED = "connections to all backends failing; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused";

test("a service that does not answer is named, and what happens next is said", () => {
  const of = (service: string, next: Next) =>
    shown(Code.Unavailable, { said: REFUSED, reason: "UNSPECIFIED", call: [service, "List"], next }).message;
  expect(of("fulmen.store.v1.RolloutService", "retried")).toBe(
    "The store does not answer. The page tries again every few seconds.",
  );
  expect(of("fulmen.algorithm.v1.TrainingRunService", "again")).toBe(
    "The algorithm service does not answer. Try again in a moment.",
  );
  expect(of("fulmen.llm_proxy.v1.RouteService", "changed")).toBe(
    "The LLM proxy does not answer. Try again in a moment.",
  );
});

test("a service that says why it cannot answer is believed", () => {
  expect(shown(Code.Unavailable, { reason: "DATABASE_UNAVAILABLE", next: "retried" }).message).toBe(
    "The store cannot reach its database. The page tries again every few seconds.",
  );
});

test("a change that got no answer may have been made", () => {
  expect(shown(Code.DeadlineExceeded, { said: "Request timed out", next: "changed" }).message).toBe(
    "The store did not answer in time. It may have been done all the same: look before you try again.",
  );
  expect(problemOf(new TypeError("Failed to fetch"), "changed").message).toMatch(
    /^The console cannot be reached. It may/,
  );
});

test("a connection that is cut is temporary, a fault of the page is not", () => {
  expect(problemOf(new ConnectError("missing EndStreamResponse", Code.Unknown), "retried")).toMatchObject({
    message: "The console cannot be reached. The page tries again every few seconds.",
    isTemporary: true,
    code: Code.Unavailable,
  });
  expect(problemOf(new TypeError("x is undefined"))).toMatchObject({
    isTemporary: false,
    technical: "TypeError: x is undefined",
  });
  expect(problemOf(new PageError("The model has no credit.")).message).toBe("The model has no credit.");
});

test("an error of a reverse proxy is not taken for one of the console", () => {
  expect(shown(Code.Unavailable, { said: "HTTP 502" }).message).toMatch(/reverse proxy, does not reach it/);
  expect(shown(Code.PermissionDenied, { said: "HTTP 403" }).message).toMatch(/reverse proxy, refused/);
  expect(
    shown(Code.NotFound, { said: "This address does not exist.", call: ["fulmen.algorithm.v1.X", "List"] }).message,
  ).toBe("This console is not connected to the algorithm service. Its operator can change that.");
});

test("who may not do something learns which token may", () => {
  const said =
    "A token of role reader may not use fulmen.store.v1.RolloutService/CancelRollout. Use a token of role admin, client, service.";
  const { message, technical } = shown(Code.PermissionDenied, {
    said,
    reason: "PERMISSION_DENIED",
    metadata: { role: "reader" },
    call: [LIST[0], "CancelRollout"],
  });
  expect(message).toBe(
    "You may not do this. It needs a token whose role is client or admin; the role of yours is reader. Sign in with another token, or ask an administrator.",
  );
  expect(technical).toContain("rpc: fulmen.store.v1.RolloutService/CancelRollout");
  expect(technical).toContain(said);
  expect(
    permissionWords("fulmen.llm_proxy.v1.X/Y affects all projects. Use a token for all projects.", "admin", "Y"),
  ).toBe("You may not do this: it affects all projects, but your token is for one. Ask an operator.");
  expect(permissionWords("The token belongs to another project. Use a token of projects/a-1.", "client", "GetX")).toBe(
    "You may not see this: your token is for another project. Sign in with a token for projects/a-1.",
  );
});

test("problems of a request are sentences, and stay as they were for forms", () => {
  const problem = shown(Code.InvalidArgument, {
    said: "The request is malformed.",
    reason: "ARGUMENT_INVALID",
    violations: [
      ["page_size", "is negative"],
      ["rollouts[2].input", "is missing"],
      ["filter", "at character 1: `foo` is not one of name, state"],
      ["", "and 3 more problems"],
    ],
  });
  expect(problem.message).toBe("The store does not accept this.");
  expect(problem.details).toEqual([
    "Page size is negative.",
    "Input is missing.",
    "Filter: at character 1: `foo` is not one of name, state.",
    "And 3 more problems.",
  ]);
  expect(problem.violations[0]).toBe("page_size: is negative");
  expect(inWords("policy.name: must be 1 to 63 of [a-z0-9_-]")).toBe("Policy name must be 1 to 63 of [a-z0-9_-].");
  expect(inWords("odd")).toBe("Odd.");
});

test("a mistyped address says so, a deleted thing too", () => {
  const get: [string, string] = [LIST[0], "GetRollout"];
  const typo = shown(Code.InvalidArgument, {
    said: "The request is malformed.",
    reason: "ARGUMENT_INVALID",
    violations: [["name", "'nope' is not of the form x"]],
    call: get,
  });
  expect(typo.message).toBe("This address does not exist. Look whether a part of it is missing or mistyped.");
  expect(typo.details).toEqual([]);
  expect(typo.technical).toContain("'nope' is not of the form x");
  expect(
    shown(Code.NotFound, { said: "The rollout does not exist.", reason: "ROLLOUT_NOT_FOUND", call: get }).message,
  ).toBe("The rollout does not exist. It may have been deleted, or belong to another project.");
});

test("a quota says when to try again, without names of settings", () => {
  expect(
    shown(Code.ResourceExhausted, {
      said: "projects/a has 9 trainers, which is the maximum (max_trainers).",
      reason: "QUOTA_EXCEEDED",
      retryS: 5,
    }).message,
  ).toBe("projects/a has 9 trainers, which is the maximum. Try again in 5 s.");
  expect(plain("The project does not exist: create it with `fulmen project create` (CreateProject).")).toBe(
    "The project does not exist: create it with `fulmen project create`.",
  );
});

test("no sentence names an rpc, whatever the code", () => {
  const codes = Object.values(Code).filter((code) => typeof code === "number");
  for (const code of codes)
    for (const reason of [undefined, "UNSPECIFIED", "INTERNAL"]) {
      const { message, technical } = shown(code, {
        said: "fulmen.store.v1.RolloutService/ListRollouts failed (page_size)",
        reason,
      });
      expect(message).toMatch(/^[A-Z].*[.]$/);
      expect(message).not.toMatch(/fulmen\.|page_size|ListRollouts/);
      expect(technical).toMatch(/code: [A-Z_]+\n/);
    }
});
