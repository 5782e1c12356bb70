import { create } from "@bufbuild/protobuf";
import { timestampFromDate } from "@bufbuild/protobuf/wkt";
import { expect, test } from "vitest";

import { TokenInfoSchema } from "../../api/gen/fulmen/store/v1/project_service_pb";
import { stateOf } from "./tokens";

test("a token is valid until it expires or is revoked", () => {
  const now = new Date("2026-03-14T00:00:00Z");
  const before = timestampFromDate(new Date("2026-03-13T00:00:00Z"));
  const after = timestampFromDate(new Date("2026-03-15T00:00:00Z"));
  const of = (times: object) => stateOf(create(TokenInfoSchema, times), now).text;
  expect(of({ expireTime: after })).toBe("valid");
  expect(of({ expireTime: before })).toBe("expired");
  expect(of({ expireTime: after, revokeTime: before })).toBe("revoked");
});
