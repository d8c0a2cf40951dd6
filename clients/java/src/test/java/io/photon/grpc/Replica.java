package io.photon.grpc;

import io.grpc.InsecureChannelCredentials;
import io.netty.channel.EventLoopGroup;
import io.photon.grpc.admin.v1.AdminServiceGrpc;
import io.photon.grpc.admin.v1.GetLoadRequest;
import io.photon.grpc.admin.v1.Load;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.net.ServerSocket;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.TimeUnit;

/** A server with the smaller embedded model as a user starts it; PHOTON_PYTHON is an interpreter that has it. */
final class Replica implements AutoCloseable {
  static final Duration PATIENCE = Duration.ofSeconds(90);
  private static final EventLoopGroup ADMIN = Channels.group("unix:");
  static final Path REPOSITORY = Path.of("../..").toAbsolutePath().normalize();

  static final String PYTHON =
      Optional.ofNullable(System.getenv("PHOTON_PYTHON")).orElse(REPOSITORY.resolve(".venv/bin/python").toString());

  /** It starts sooner than the larger one. */
  private static final String MODEL = REPOSITORY.resolve("photon_grpc/demo/draft").toString();

  final String target;
  private final Path directory;
  private final List<String> flags;
  private Process process;

  private Replica(List<String> flags) {
    try {
      directory = Files.createTempDirectory("photon");
      target = "127.0.0.1:" + freePort();
      this.flags = List.copyOf(flags);
      process = start();
    } catch (IOException failed) {
      throw new UncheckedIOException(failed);
    }
    Runtime.getRuntime().addShutdownHook(new Thread(this::close));
  }

  /** Started, not yet ready. */
  static Replica start(String... flags) {
    return new Replica(List.of(flags));
  }

  String unixTarget() {
    return "unix:" + directory.resolve("calls.sock");
  }

  Replica awaitReady() {
    try (var client = Client.connect(target)) {
      client.waitUntilReady(PATIENCE);
    }
    return this;
  }

  /** End it as a crash does: at once, with every process of it. */
  void kill() {
    process.descendants().forEach(ProcessHandle::destroyForcibly);
    process.destroyForcibly();
    process.onExit().join();
  }

  /** End it as a rolling restart does: running requests get --drain-timeout. */
  void drain() {
    beginToDrain();
    process.onExit().join();
  }

  void beginToDrain() {
    process.destroy();
  }

  /** Start it again where it was, and wait for it. */
  void restart() throws IOException {
    process = start();
    awaitReady();
  }

  Load load() {
    var channel = Channels.builder(adminTarget(), InsecureChannelCredentials.create(), ADMIN, Map.of()).build();
    try {
      return AdminServiceGrpc.newBlockingStub(channel)
          .withDeadlineAfter(20, TimeUnit.SECONDS)
          .getLoad(GetLoadRequest.getDefaultInstance())
          .getLoad();
    } finally {
      channel.shutdownNow();
    }
  }

  /** Return when nothing runs or waits any more. */
  void awaitIdle() throws InterruptedException {
    var deadline = System.nanoTime() + Duration.ofSeconds(20).toNanos();
    Load load = load();
    while (load.getRunningRequests() + load.getQueuedRequests() + load.getOwnedKvBlocks() > 0) {
      if (System.nanoTime() > deadline) {
        throw new AssertionError("still at work: " + load);
      }
      Thread.sleep(20);
      load = load();
    }
  }

  /** As an operator ends it; a frozen one is killed. */
  @Override
  public void close() {
    process.destroy();
    try {
      if (!process.waitFor(20, TimeUnit.SECONDS)) {
        kill();
      }
    } catch (InterruptedException interrupted) {
      kill();
    }
  }

  private Process start() throws IOException {
    var command = new ArrayList<>(List.of(PYTHON, "-m", "photon_grpc", "serve", MODEL, "--listen", target));
    command.addAll(List.of("--listen", unixTarget(), "--admin-listen", adminTarget()));
    command.addAll(List.of("--max-num-seqs", "16", "--num-blocks", "2048"));
    command.addAll(flags);
    var builder = new ProcessBuilder(command).directory(REPOSITORY.toFile());
    builder.redirectErrorStream(true).redirectOutput(directory.resolve("log").toFile());
    return builder.start();
  }

  private String adminTarget() {
    return "unix:" + directory.resolve("admin.sock");
  }

  private static int freePort() throws IOException {
    try (var socket = new ServerSocket(0)) {
      return socket.getLocalPort();
    }
  }
}
