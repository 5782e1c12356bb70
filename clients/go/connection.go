package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"

	llmproxyv1 "fulmen.dev/client/stubs/fulmen/llm_proxy/v1"
	storev1 "fulmen.dev/client/stubs/fulmen/store/v1"
)

const retryPause = 200 * time.Millisecond

// connection has the clients of the store and the LLM proxy. The first call opens it; gRPC reconnects it.
type connection struct {
	leases      storev1.LeaseServiceClient
	rollouts    storev1.RolloutServiceClient
	spans       storev1.SpanServiceClient
	completions llmproxyv1.CompletionServiceClient
}

func connect() (*connection, error) {
	security, err := channelSecurity()
	if err != nil {
		return nil, err
	}
	// A restarted server is found within a second.
	pace := backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second}
	reconnect := grpc.WithConnectParams(grpc.ConnectParams{Backoff: pace, MinConnectTimeout: 5 * time.Second})
	store, err := grpc.Dial(environment("FULMEN_STORE_TARGET", "127.0.0.1:7101"), security, reconnect)
	if err != nil {
		return nil, err
	}
	proxy, err := grpc.Dial(environment("FULMEN_LLM_PROXY_TARGET", "127.0.0.1:7201"), security, reconnect)
	if err != nil {
		return nil, err
	}
	return &connection{
		leases:      storev1.NewLeaseServiceClient(store),
		rollouts:    storev1.NewRolloutServiceClient(store),
		spans:       storev1.NewSpanServiceClient(store),
		completions: llmproxyv1.NewCompletionServiceClient(proxy),
	}, nil
}

// as adds the caller's credentials: a token or an attempt key.
func as(ctx context.Context, key string) context.Context {
	return metadata.NewOutgoingContext(ctx, metadata.Pairs("authorization", "Bearer "+key))
}

func ownToken() (string, error) {
	if token, file := os.Getenv("FULMEN_TOKEN"), os.Getenv("FULMEN_TOKEN_FILE"); token != "" || file == "" {
		return token, nil
	} else {
		text, err := os.ReadFile(file)
		return strings.TrimSpace(string(text)), err
	}
}

func channelSecurity() (grpc.DialOption, error) {
	authority := os.Getenv("FULMEN_TLS_CA_FILE")
	if authority == "" {
		return grpc.WithInsecure(), nil
	}
	pem, err := os.ReadFile(authority)
	if err != nil {
		return nil, err
	}
	settings := &tls.Config{RootCAs: x509.NewCertPool()}
	if !settings.RootCAs.AppendCertsFromPEM(pem) {
		return nil, errors.New("no certificate found in " + authority)
	}
	if certificate := os.Getenv("FULMEN_TLS_CERTIFICATE_FILE"); certificate != "" {
		pair, err := tls.LoadX509KeyPair(certificate, os.Getenv("FULMEN_TLS_KEY_FILE"))
		if err != nil {
			return nil, err
		}
		settings.Certificates = []tls.Certificate{pair}
	}
	return grpc.WithTransportCredentials(credentials.NewTLS(settings)), nil
}

func environment(name, otherwise string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return otherwise
}

// whileUnavailable repeats an operation while the server cannot be reached: the only error that may be retried
// unchanged.
func whileUnavailable(ctx context.Context, work func(context.Context) error) error {
	for {
		err := work(ctx)
		if err == nil || !decoded(err).unreachable() {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(retryPause):
		}
	}
}
