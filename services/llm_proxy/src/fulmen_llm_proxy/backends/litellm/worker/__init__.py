"""Calls one vendor through LiteLLM: a server of the OpenAI API on a Unix socket, for the proxy alone.

The proxy runs it with the interpreter of another environment (`tools/litellm_env.sh`): it imports nothing of Fulmen, and nothing of
Fulmen imports it.

Invariant: it connects to the vendor's address and to no other, whatever a request or LiteLLM names. The key comes with each call
and is kept nowhere.
"""
