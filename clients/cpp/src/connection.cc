#include "connection.h"

#include <cstdlib>
#include <fstream>
#include <sstream>

namespace {

std::string Environment(const char* name, const std::string& otherwise = "") {
  const char* value = std::getenv(name);
  return value && *value ? value : otherwise;
}

std::string FileText(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string OwnToken() {
  const auto token = Environment("FULMEN_TOKEN");
  const auto file = Environment("FULMEN_TOKEN_FILE");
  if (!token.empty() || file.empty()) return token;
  auto text = FileText(file);
  return text.substr(0, text.find_last_not_of(" \n") + 1);
}

std::shared_ptr<grpc::ChannelCredentials> Security() {
  const auto authority = Environment("FULMEN_TLS_CA_FILE");
  const auto certificate = Environment("FULMEN_TLS_CERTIFICATE_FILE");
  if (authority.empty()) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = FileText(authority);
  if (!certificate.empty()) {
    options.pem_cert_chain = FileText(certificate);
    options.pem_private_key = FileText(Environment("FULMEN_TLS_KEY_FILE"));
  }
  return grpc::SslCredentials(options);
}

}  // namespace

Connection Connect(Clock::time_point deadline) {
  grpc::ChannelArguments pace;  // a restarted server is found within a second
  pace.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  pace.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 100);
  pace.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  const auto security = Security();
  auto to_store = grpc::CreateCustomChannel(Environment("FULMEN_STORE_TARGET", "127.0.0.1:7101"), security, pace);
  auto to_proxy = grpc::CreateCustomChannel(Environment("FULMEN_LLM_PROXY_TARGET", "127.0.0.1:7201"), security, pace);
  return {
      .leases = store::LeaseService::NewStub(to_store),
      .rollouts = store::RolloutService::NewStub(to_store),
      .spans = store::SpanService::NewStub(to_store),
      .completions = llm_proxy::CompletionService::NewStub(to_proxy),
      .token = OwnToken(),
      .deadline = deadline,
  };
}

std::unique_ptr<grpc::ClientContext> CallBy(const std::string& key, Clock::time_point deadline) {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(deadline);
  context->AddMetadata("authorization", "Bearer " + key);
  return context;
}
