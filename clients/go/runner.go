package main

import (
	"context"
	"io"
	"os"
	"time"

	"google.golang.org/grpc/metadata"

	storev1 "fulmen.dev/client/stubs/fulmen/store/v1"
)

const releaseLimit = 5 * time.Second

type (
	request = storev1.StreamLeasesRequest
	leases  = storev1.LeaseService_StreamLeasesClient // a broken stream fails in reads, not in writes
)

// runner holds the lease stream, runs the attempts that it is assigned, and reports their results. One goroutine owns
// all fields; the stream, the attempts and the clock send to it through channels.
type runner struct {
	store   *connection
	options options

	name           string
	handled        int // attempts that are acknowledged or lost
	credits        int // granted and not yet used by an assignment
	running        map[string]*work
	unacknowledged map[string]*storev1.AttemptResult
	ended          chan *work
}

// work is a running attempt.
type work struct {
	stop   context.CancelFunc
	result *storev1.AttemptResult
}

// run works until `count` attempts are handled. The session outlives its streams: leases survive a reconnect.
func run(ctx context.Context, store *connection, o options) error {
	r := &runner{store: store, options: o, ended: make(chan *work)}
	r.running, r.unacknowledged = map[string]*work{}, map[string]*storev1.AttemptResult{}
	defer r.endSession(ctx)
	for r.handled < o.count {
		if err := whileUnavailable(ctx, r.holdStream); err != nil {
			return err
		}
	}
	return nil
}

func (r *runner) holdStream(parent context.Context) error {
	ctx, cancel := context.WithCancel(parent)
	defer cancel()
	stream, err := r.store.leases.StreamLeases(ctx)
	if err != nil {
		return err
	}
	messages, broken := received(ctx, stream)
	r.open(stream)
	renewal := time.NewTicker(time.Hour) // until the store has sent the duration of a lease
	defer renewal.Stop()
	for leaving := false; ; {
		select {
		case message := <-messages:
			if opened := message.GetOpened(); opened != nil {
				r.opened(stream, opened, renewal)
			}
			r.take(parent, message)
			if message.GetDrain() != nil || r.handled >= r.options.count {
				leaving = true // attempts that end from here on are reported on the next stream
				_ = stream.CloseSend()
			}
		case done := <-r.ended:
			if r.finish(done) && !leaving {
				report(stream, done.result)
			}
		case <-renewal.C:
			if !leaving {
				_ = stream.Send(&request{Message: &storev1.StreamLeasesRequest_Renew{Renew: &storev1.RenewSession{}}})
			}
		case err := <-broken:
			if err == io.EOF {
				return nil // the store's answer to CloseSend
			}
			if decoded(err).Reason == "SESSION_ENDED" {
				r.forgetSession()
				return nil
			}
			return err
		}
		if !leaving {
			r.grant(stream)
		}
	}
}

// received reads a stream to its end.
func received(ctx context.Context, stream leases) (
	<-chan *storev1.StreamLeasesResponse, <-chan error,
) {
	messages, broken := make(chan *storev1.StreamLeasesResponse), make(chan error, 1)
	go func() {
		for {
			message, err := stream.Recv()
			if err != nil {
				broken <- err
				return
			}
			select {
			case messages <- message:
			case <-ctx.Done():
				return
			}
		}
	}()
	return messages, broken
}

func (r *runner) open(stream leases) {
	host, _ := os.Hostname()
	running := []string{}
	for attempt := range r.running {
		running = append(running, attempt)
	}
	for attempt := range r.unacknowledged {
		running = append(running, attempt)
	}
	info := &storev1.RunnerInfo{
		Host: host, Version: "go", Labels: r.options.labels(), SlotCount: int32(r.options.slots),
	}
	r.credits = 0 // credits do not survive a stream
	_ = stream.Send(&request{Message: &storev1.StreamLeasesRequest_Open{Open: &storev1.OpenSession{
		Runner:          r.name,
		Info:            info,
		RunningAttempts: running,
		Projects:        []string{r.options.project},
	}}})
}

func (r *runner) opened(stream leases, opened *storev1.SessionOpened, renewal *time.Ticker) {
	ttl := opened.LeaseTtl.AsDuration()
	emit(object{
		"event": "opened", "runner": opened.Runner, "resumed": opened.Runner == r.name,
		"lease_ttl_s": ttl.Seconds(),
	})
	r.name = opened.Runner
	r.lose(opened.LostAttempts)
	renewal.Reset(ttl / 3)
	for _, result := range r.unacknowledged {
		report(stream, result)
	}
}

func (r *runner) take(ctx context.Context, message *storev1.StreamLeasesResponse) {
	for _, assignment := range message.GetAssign().GetAssignments() {
		r.start(ctx, assignment)
	}
	for _, ack := range message.GetAck().GetAcks() {
		r.acknowledge(ack)
	}
	r.cancel(message.GetCancel().GetAttempts())
	r.lose(message.GetLeaseLost().GetAttempts())
	if message.GetDrain() != nil {
		emit(object{"event": "drain"})
	}
}

// grant gives credits for places that are free, and never for more attempts than are still wanted.
func (r *runner) grant(stream leases) {
	free := r.options.count - r.handled
	if free > r.options.slots {
		free = r.options.slots
	}
	free -= len(r.running) + len(r.unacknowledged) + r.credits
	if free <= 0 {
		return
	}
	r.credits += free
	credits := &storev1.AddCredits{CreditCount: int32(free)}
	_ = stream.Send(&request{Message: &storev1.StreamLeasesRequest_AddCredits{AddCredits: credits}})
}

func (r *runner) start(ctx context.Context, assignment *storev1.Assignment) {
	ctx, stop := context.WithCancel(ctx)
	this := &work{stop: stop}
	r.credits--
	r.running[assignment.Attempt] = this
	emit(object{"event": "assigned", "attempt": assignment.Attempt})
	go func() {
		this.result = attempted(ctx, r.store, assignment, r.options)
		r.ended <- this
	}()
}

// finish returns whether the attempt's result is still wanted.
func (r *runner) finish(done *work) bool {
	done.stop()
	attempt := done.result.Attempt
	if r.running[attempt] != done {
		return false
	}
	delete(r.running, attempt)
	r.unacknowledged[attempt] = done.result
	return true
}

func report(stream leases, result *storev1.AttemptResult) {
	completed := &storev1.CompletedAttempts{Results: []*storev1.AttemptResult{result}}
	_ = stream.Send(&request{Message: &storev1.StreamLeasesRequest_Complete{Complete: completed}})
}

func (r *runner) acknowledge(ack *storev1.CompletionAck) {
	if r.unacknowledged[ack.Attempt] == nil {
		return
	}
	delete(r.unacknowledged, ack.Attempt)
	r.handled++
	emit(object{"event": "acknowledged", "attempt": ack.Attempt, "status": ack.Status.String(), "message": ack.Message})
}

// cancel stops attempts whose rollouts were cancelled; each ends as CANCELLED and is reported like any other.
func (r *runner) cancel(attempts []string) {
	for _, attempt := range attempts {
		if this := r.running[attempt]; this != nil {
			emit(object{"event": "cancel", "attempt": attempt})
			this.stop()
		}
	}
}

// lose forgets attempts whose leases have expired: the store would discard their results.
func (r *runner) lose(attempts []string) {
	for _, attempt := range attempts {
		if this := r.running[attempt]; this != nil {
			this.stop()
		} else if r.unacknowledged[attempt] == nil {
			continue
		}
		delete(r.running, attempt)
		delete(r.unacknowledged, attempt)
		r.handled++
		emit(object{"event": "lease_lost", "attempt": attempt})
	}
}

func (r *runner) forgetSession() {
	emit(object{"event": "session_ended", "runner": r.name})
	for _, this := range r.running {
		this.stop()
	}
	r.running, r.unacknowledged = map[string]*work{}, map[string]*storev1.AttemptResult{}
	r.name = ""
}

// endSession releases the remaining leases, so that rollouts need not wait until the session expires.
func (r *runner) endSession(ctx context.Context) {
	if r.name == "" {
		return
	}
	called, _ := metadata.FromOutgoingContext(ctx)
	ctx, cancel := context.WithTimeout(metadata.NewOutgoingContext(context.Background(), called), releaseLimit)
	defer cancel()
	// If this fails, the session expires later.
	_, _ = r.store.leases.ReleaseLeases(ctx, &storev1.ReleaseLeasesRequest{Runner: r.name})
}
