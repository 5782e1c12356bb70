#!/usr/bin/env bash
# Generates the stubs, compiles, and leaves the program as build/client. The jars are Debian's, in /usr/share/java.
set -euo pipefail
cd "$(dirname "$0")"
jars=(
  grpc-api grpc-context grpc-core grpc-stub grpc-protobuf grpc-protobuf-lite grpc-netty protobuf protobuf-util
  guava gson perfmark-api geronimo-annotation-1.3-spec
  netty-buffer netty-codec netty-codec-http netty-codec-http2 netty-common netty-handler netty-resolver netty-transport
  netty-tcnative netty-transport-native-unix-common
)
classpath=$(printf '/usr/share/java/%s.jar:' "${jars[@]}")

../../node_modules/.bin/buf generate
rm -rf build/classes
find build/gen src -name '*.java' >build/sources
javac -nowarn -proc:none -d build/classes -cp "$classpath" @build/sources
# TLS needs ALPN, which Debian's Netty has from OpenSSL alone; it looks for it under another name than Debian gives it.
mkdir -p build/native
cp "/usr/lib/$(uname -m)-linux-gnu/jni/libnetty-tcnative.so" build/native/libnetty_tcnative.so
# A program that lives for seconds starts faster without the second compiler.
cat >build/client <<EOF
#!/bin/sh
build=\$(dirname "\$0")
exec java -XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Djava.library.path="\$build/native" \\
  -cp "\$build/classes:$classpath" dev.fulmen.client.Main "\$@"
EOF
chmod +x build/client
