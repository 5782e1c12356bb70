// Errors of Fulmen's servers, with the reason from `google.rpc.ErrorInfo`.
#pragma once

#include <grpcpp/support/status.h>

#include <map>
#include <stdexcept>
#include <string>

// A server's refusal, or a failure of gRPC; `reason` is empty if no server sent one.
struct Error : std::runtime_error {
  Error(std::string code, const std::string& message) : std::runtime_error(message), code(std::move(code)) {}

  // Whether no server answered, or the connection broke. gRPC may report that as INTERNAL, too; a server's INTERNAL
  // always has a reason.
  bool unreachable() const { return code == "UNAVAILABLE" || (code == "INTERNAL" && reason.empty()); }

  std::string code;
  std::string reason;
  std::map<std::string, std::string> metadata;
};

// Throws the call's error, if it failed.
void Check(const grpc::Status& status);
