// Connects to Fulmen's store with nothing but the .proto files: no generated code, no Fulmen package.

import path from "node:path";
import { fileURLToPath } from "node:url";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const PROTOS = path.resolve(path.dirname(fileURLToPath(import.meta.url)), "../../../protos");
const DEFINITION = protoLoader.loadSync(
  ["fulmen/store/v1/rollout_service.proto", "fulmen/store/v1/lease_service.proto"],
  { includeDirs: [PROTOS], longs: String, enums: String, defaults: true, oneofs: true },
);
const { RolloutService, LeaseService } = grpc.loadPackageDefinition(DEFINITION).fulmen.store.v1;

/**
 * Opens clients of the store's services.
 *
 * @param {string} target - `host:port` of the store.
 * @param {string} token - sent with every call.
 */
export function connect(target, token) {
  const credentials = grpc.credentials.createInsecure();
  return {
    rollouts: new RolloutService(target, credentials),
    leases: new LeaseService(target, credentials),
    metadata() {
      const metadata = new grpc.Metadata();
      metadata.set("authorization", `Bearer ${token}`);
      return metadata;
    },
    close() {
      this.rollouts.close();
      this.leases.close();
    },
  };
}

/** Calls a unary rpc; rejects with grpc-js's error, whose `code` is the canonical status code. */
export function call(client, method, request, metadata, deadlineMs) {
  return new Promise((resolve, reject) => {
    const options = { deadline: Date.now() + deadlineMs };
    client[method](request, metadata, options, (error, response) => (error ? reject(error) : resolve(response)));
  });
}
