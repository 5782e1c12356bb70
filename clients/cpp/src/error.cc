#include "error.h"

#include <array>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace {

constexpr std::array kCodes = {
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
};

}  // namespace

void Check(const grpc::Status& status) {
  if (status.ok()) return;
  Error error(kCodes.at(status.error_code()), status.error_message());
  google::rpc::Status details;
  if (details.ParseFromString(status.error_details())) {
    for (const auto& detail : details.details()) {
      google::rpc::ErrorInfo info;
      if (!detail.UnpackTo(&info)) continue;
      error.reason = info.reason();
      error.metadata = {info.metadata().begin(), info.metadata().end()};
    }
  }
  throw error;
}
