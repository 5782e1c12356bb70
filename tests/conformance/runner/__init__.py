"""What a runner must do, over real sockets, against any store that keeps the contract."""
