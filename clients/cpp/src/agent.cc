// A real agent replaces `Solve`. The rest is what any runner must do: keep the time limit,
// stop when requested, record a span, and report how the attempt ended.

#include "agent.h"

#include <google/protobuf/util/time_util.h>

#include <condition_variable>
#include <cstdio>
#include <mutex>

#include "ids.h"
#include "opentelemetry/proto/trace/v1/trace.pb.h"

namespace {

using google::protobuf::util::TimeUtil;
using nlohmann::json;

class Attempt {
 public:
  Attempt(const Connection& connection, const store::Assignment& assignment, const Options& options,
          std::stop_token stop)
      : connection_(connection), assignment_(assignment), options_(options), stop_(std::move(stop)) {
    const auto timeout = std::chrono::milliseconds(TimeUtil::DurationToMilliseconds(assignment.timeout()));
    limit_ = std::min(connection.deadline, Clock::now() + timeout);
  }

  void Work(store::AttemptResult* result) const {
    const auto began = Clock::now();
    const std::string question = json::parse(assignment_.rollout().input()).at("question");
    int left = 0, right = 0;
    if (std::sscanf(question.c_str(), "%d*%d=", &left, &right) != 2) throw std::invalid_argument(question);
    const auto product = std::to_string(left * right);
    const auto answer = Solve(question, product);
    ReportSpan(began, {{"question", question}, {"answer", answer}});
    result->add_rewards()->set_value(answer.find(product) == std::string::npos ? 0 : 1);
    result->set_output(json{{"answer", answer}}.dump());
    result->set_output_content_type("application/json");
  }

  store::FailureKind FailureKindOf(const std::exception& failure) const {
    if (stop_.stop_requested()) return store::FAILURE_KIND_CANCELLED;
    if (Clock::now() >= limit_) return store::FAILURE_KIND_TIMEOUT;
    const auto* error = dynamic_cast<const Error*>(&failure);
    return error && error->unreachable() ? store::FAILURE_KIND_INFRA : store::FAILURE_KIND_AGENT_ERROR;
  }

 private:
  // Asks the model, if there is one; otherwise computes the answer.
  std::string Solve(const std::string& question, const std::string& product) const {
    Think();
    if (options_.model.empty()) return product;
    const json body = {{"model", options_.model}, {"messages", {{{"role", "user"}, {"content", question}}}}};
    llm_proxy::CompleteRequest request;
    llm_proxy::CompleteResponse answer;
    request.set_path("/v1/chat/completions");
    request.set_body_json(body.dump());
    // The attempt key names the attempt: the proxy records the call for it, and refuses the key once it ends.
    const auto call = CallBy(assignment_.attempt_key(), limit_);
    const std::stop_callback cancelled(stop_, [&] { call->TryCancel(); });
    Check(connection_.completions->Complete(call.get(), request, &answer));
    // A refusal by the backend or the proxy is an answer with its HTTP status, not an error of the rpc.
    if (answer.http_status() != 200) {
      const auto said = "the model answered " + std::to_string(answer.http_status()) + ": " + answer.body_json();
      throw Error(answer.http_status() >= 500 ? "UNAVAILABLE" : "FAILED", said);
    }
    return json::parse(answer.body_json()).at("choices").at(0).at("message").at("content");
  }

  void Think() const {
    std::mutex mutex;
    std::condition_variable_any never;
    std::unique_lock lock(mutex);
    const auto until = Clock::now() + std::chrono::microseconds(static_cast<int64_t>(options_.work_s * 1e6));
    never.wait_until(lock, stop_, std::min(until, limit_), [] { return false; });
    if (stop_.stop_requested() || limit_ < until) throw std::runtime_error("stopped");
  }

  // Appends one span and waits until it is durable, so that readers of the finished attempt find it.
  void ReportSpan(Clock::time_point began, const std::map<std::string, std::string>& about) const {
    const auto nanoseconds = [](Clock::time_point time) {
      return std::chrono::nanoseconds(time.time_since_epoch()).count();
    };
    const auto ended = Clock::now();
    opentelemetry::proto::trace::v1::Span span;
    span.set_trace_id(Random(16));
    span.set_span_id(Random(8));
    span.set_name("solve");
    span.set_start_time_unix_nano(nanoseconds(began));
    span.set_end_time_unix_nano(nanoseconds(ended));
    for (const auto& [key, text] : about) {
      auto* attribute = span.add_attributes();
      attribute->set_key(key);
      attribute->mutable_value()->set_string_value(text);
    }
    store::SpanBatch batch;
    batch.add_spans()->set_otlp_span(span.SerializeAsString());
    batch.mutable_spans(0)->set_scope("client");

    store::AppendSpansRequest request;
    auto* chunk = request.add_chunks();
    chunk->set_attempt(assignment_.attempt());
    chunk->set_chunk_id(Uuid());  // a chunk that is sent again with the same id is stored once
    chunk->set_span_count(1);
    chunk->set_codec(store::SPAN_CODEC_IDENTITY);
    chunk->set_payload(batch.SerializeAsString());
    *chunk->mutable_start_time() = TimeUtil::NanosecondsToTimestamp(nanoseconds(began));
    *chunk->mutable_end_time() = TimeUtil::NanosecondsToTimestamp(nanoseconds(ended));

    const auto call = CallBy(assignment_.attempt_key(), limit_);
    const std::stop_callback cancelled(stop_, [&] { call->TryCancel(); });
    const auto stream = connection_.spans->AppendSpans(call.get());
    stream->Write(request);
    stream->WritesDone();
    std::string rejected;
    for (store::AppendSpansResponse answer; stream->Read(&answer);) {
      for (const auto& one : answer.rejected()) rejected = one.message();
    }
    Check(stream->Finish());
    if (!rejected.empty()) throw std::runtime_error("the store rejected the span: " + rejected);
  }

  const Connection& connection_;
  const store::Assignment& assignment_;
  const Options& options_;
  const std::stop_token stop_;
  Clock::time_point limit_;
};

}  // namespace

store::AttemptResult Attempted(const Connection& connection, const store::Assignment& assignment,
                               const Options& options, std::stop_token stop) {
  store::AttemptResult result;
  result.set_attempt(assignment.attempt());
  result.set_lease_id(assignment.lease_id());
  result.set_epoch(assignment.epoch());
  const Attempt attempt(connection, assignment, options, std::move(stop));
  try {
    attempt.Work(&result);
  } catch (const std::exception& failure) {
    result.set_failure_kind(attempt.FailureKindOf(failure));
    result.set_failure_message(failure.what());
  }
  return result;
}
