// A runner: holds the lease stream, works through what it is assigned, reports it.
#pragma once

#include <google/protobuf/repeated_field.h>

#include <map>
#include <memory>
#include <string>
#include <thread>

#include "connection.h"
#include "mailbox.h"
#include "options.h"

// One thread owns all fields; the stream and the attempts leave in its mailbox what is to be done.
class Runner {
 public:
  Runner(const Connection& connection, const Options& options) : connection_(connection), options_(options) {}
  // Gives back what is still leased, so that nobody waits for the session's time to run out.
  ~Runner();

  // Works until `count` attempts are handled. The session outlives its streams: leases are kept over a reconnect.
  void Run();

 private:
  using Names = google::protobuf::RepeatedPtrField<std::string>;
  using Stream = grpc::ClientReaderWriter<store::StreamLeasesRequest, store::StreamLeasesResponse>;

  void HoldStream();
  void Take(const store::StreamLeasesResponse& message);
  void Leave();
  void Open();
  void Opened(const store::SessionOpened& opened);
  void Renew();
  void Grant();
  void Start(const store::Assignment& assignment);
  void Finish(const store::AttemptResult& result);
  void Report(const store::AttemptResult& result);
  void Acknowledge(const store::CompletionAck& ack);
  void Cancel(const Names& attempts);
  void Lose(const Names& attempts);
  void ForgetSession();

  const Connection& connection_;
  const Options& options_;
  Mailbox mailbox_;
  std::string runner_;
  int handled_ = 0;                            // attempts that are acknowledged or lost
  int credits_ = 0;                            // granted and not yet used by an assignment
  std::map<std::string, std::jthread> running_;  // to forget one is to stop it
  std::map<std::string, store::AttemptResult> unacknowledged_;

  // Of the stream that is open now.
  std::unique_ptr<Stream> stream_;
  bool over_ = false;
  bool leaving_ = false;  // what ends from here on is reported on the next stream
  Clock::duration renewal_{};
  Clock::time_point renew_at_;
};
