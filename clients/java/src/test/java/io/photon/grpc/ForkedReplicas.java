package io.photon.grpc;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.Writer;
import java.net.ServerSocket;
import java.util.ArrayList;
import java.util.List;
import java.util.stream.Collectors;

/** Servers with the smaller embedded model that can be killed and are there again in a moment: forks of one process. */
final class ForkedReplicas implements AutoCloseable {
  private final Process parent;
  private final Writer addresses;
  private final BufferedReader processIds;
  private final List<String> targets = new ArrayList<>();
  private final List<Long> pids = new ArrayList<>();

  ForkedReplicas(int count) throws IOException {
    var builder = new ProcessBuilder(Replica.PYTHON, "-m", "tests.clients.replicas");
    builder.directory(Replica.REPOSITORY.toFile()).redirectError(ProcessBuilder.Redirect.DISCARD);
    parent = builder.start();
    addresses = parent.outputWriter();
    processIds = parent.inputReader();
    for (int i = 0; i < count; i++) {
      try (var socket = new ServerSocket(0)) {
        targets.add("127.0.0.1:" + socket.getLocalPort());
      }
      pids.add(start(i));
    }
  }

  /** All under one name. */
  String target() {
    return targets.stream().collect(Collectors.joining(",", "ipv4:", ""));
  }

  void kill(int index) {
    var process = ProcessHandle.of(pids.get(index)).orElseThrow();
    process.destroyForcibly();
    process.onExit().join();
  }

  void restart(int index) throws IOException {
    pids.set(index, start(index));
  }

  /** Its replicas die with it. */
  @Override
  public void close() {
    parent.destroyForcibly();
  }

  /** Return the process id when it is ready. */
  private long start(int index) throws IOException {
    addresses.write(targets.get(index) + "\n");
    addresses.flush();
    return Long.parseLong(processIds.readLine());
  }
}
