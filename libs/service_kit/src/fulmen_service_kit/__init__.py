"""What every Fulmen service needs: settings, logs, telemetry, tokens, the rpc edge and one lifecycle."""
