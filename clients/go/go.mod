module fulmen.dev/client

go 1.19

// What it is built and tested against, Debian's packages; programs that use it may have newer ones.
require (
	google.golang.org/genproto v0.0.0-20200413115906-b5235f65be36
	google.golang.org/grpc v1.33.3
	google.golang.org/protobuf v1.28.1
)
