package io.photon.grpc;

import com.sun.management.OperatingSystemMXBean;
import io.grpc.CallOptions;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.stub.ClientCalls;
import io.photon.grpc.v1.GenerateRequest;
import io.photon.grpc.v1.InferenceServiceGrpc;
import io.photon.grpc.v1.StreamGenerateResponse;
import java.lang.management.ManagementFactory;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Iterator;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;

/**
 * Costs of the client beside those of the stubs alone, each against the same server without a model in a process of its
 * own, so that the CPU time is the client's. {@code ClientBenchmark} measures, {@code ClientBenchmark serve PAUSE_MS}
 * serves; see benchmarks/results/clients_java.md.
 */
final class ClientBenchmark {
  private static final int TOKENS = 25_600;
  private static final int ROUNDS = 4;
  private static final int CALLS = 400;
  private static final int OPEN = 1_000;

  /** Reads one stream to its end, and returns its tokens. */
  private interface Reader extends Function<Request, Integer> {}

  public static void main(String[] arguments) throws Exception {
    if (arguments.length > 0) {
      System.out.println(new FakeServer(Integer.parseInt(arguments[1]), true).target());
      Thread.currentThread().join();
    }
    throughput();
    latency();
    memory();
    System.exit(0);
  }

  private static void throughput() throws Exception {
    try (var server = Server.start(0);
        var client = Client.connect(server.target);
        var many = client.multiplex()) {
      var stubs = stubs(server.target);
      var names = List.of("stubs", "client", "multiplex");
      var readers = List.<Reader>of(request -> raw(stubs, request), of(client), of(many));
      for (var reader : readers) {
        measure(reader, 64);
      }
      System.out.println("| streams | | tokens/s | CPU us/token |\n|--:|---|--:|--:|");
      for (var streams : new int[] {1, 64, 256}) {
        var best = new Cost[readers.size()];
        for (int round = 0; round < ROUNDS; round++) {
          for (int i = 0; i < best.length; i++) {
            best[i] = Cost.better(best[i], measure(readers.get(i), streams));
          }
        }
        for (int i = 0; i < best.length; i++) {
          System.out.printf("| %d | %s | %s |%n", streams, names.get(i), best[i]);
        }
      }
      stubs.shutdownNow();
    }
  }

  private static Cost measure(Reader reader, int streams) throws InterruptedException {
    var request = Request.text("x").seed(1).maxTokens(TOKENS / streams);
    var over = new CountDownLatch(streams);
    var cpu = cpuNanos();
    var start = System.nanoTime();
    for (int i = 0; i < streams; i++) {
      new Thread(
              () -> {
                reader.apply(request);
                over.countDown();
              })
          .start();
    }
    over.await();
    var seconds = (System.nanoTime() - start) / 1e9;
    var tokens = TOKENS / streams * streams;
    return new Cost(tokens / seconds, (cpuNanos() - cpu) / 1e3 / tokens);
  }

  private record Cost(double tokensPerSecond, double cpuMicros) {
    static Cost better(Cost one, Cost other) {
      return one != null && one.cpuMicros < other.cpuMicros ? one : other;
    }

    @Override
    public String toString() {
      return String.format("%,.0f | %.1f", tokensPerSecond, cpuMicros);
    }
  }

  /** One message at a time, one call after another: stubs and client in turn. */
  private static void latency() throws Exception {
    try (var server = Server.start(0);
        var client = Client.connect(server.target)) {
      var stubs = stubs(server.target);
      var request = Request.text("x").seed(1).maxTokens(1);
      var readers = List.<Reader>of(sent -> raw(stubs, sent), of(client));
      var micros = new long[readers.size()][CALLS];
      for (int call = -CALLS; call < CALLS; call++) {
        for (int i = 0; i < readers.size(); i++) {
          var start = System.nanoTime();
          readers.get(i).apply(request);
          micros[i][Math.max(call, 0)] = (System.nanoTime() - start) / 1000;
        }
      }
      for (int i = 0; i < readers.size(); i++) {
        Arrays.sort(micros[i]);
        System.out.printf(
            "%s, a stream of one token: p50 %d us, p90 %d us%n",
            i == 0 ? "stubs" : "client", micros[i][CALLS / 2], micros[i][CALLS * 9 / 10]);
      }
      stubs.shutdownNow();
    }
  }

  private static void memory() throws Exception {
    try (var server = Server.start(600_000);
        var client = Client.connect(server.target)) {
      var stubs = stubs(server.target);
      var request = Request.text("x").seed(1).maxTokens(1000);
      held("stubs", sent -> start(stubs, sent.toProto()), request);
      held("client", client::stream, request);
      stubs.shutdownNow();
    }
  }

  private static void held(String name, Function<Request, Object> opener, Request request) {
    var before = heapBytes();
    var open = new ArrayList<Object>();
    for (int i = 0; i < OPEN; i++) {
      var stream = opener.apply(request);
      ((Iterator<?>) stream).next();
      open.add(stream);
    }
    var each = (heapBytes() - before) / 1024.0 / open.size();
    System.out.printf("%s, %d open streams: %.1f KiB of heap each%n", name, open.size(), each);
  }

  private static Reader of(Generator calls) {
    return request -> {
      int tokens = 0;
      try (var stream = calls.stream(request)) {
        for (var delta : stream) {
          tokens += delta.text().isEmpty() ? 0 : 1;
        }
      }
      return tokens;
    };
  }

  private static Integer raw(ManagedChannel channel, Request request) {
    int tokens = 0;
    for (var messages = start(channel, request.toProto()); messages.hasNext(); ) {
      for (var delta : messages.next().getDeltasList()) {
        tokens += delta.getText().isEmpty() ? 0 : 1;
      }
    }
    return tokens;
  }

  private static Iterator<StreamGenerateResponse> start(
      ManagedChannel channel, GenerateRequest request) {
    var options = CallOptions.DEFAULT.withDeadlineAfter(600, TimeUnit.SECONDS);
    return ClientCalls.blockingServerStreamingCall(
        channel, InferenceServiceGrpc.getStreamGenerateMethod(), options, request);
  }

  private static ManagedChannel stubs(String target) {
    return Channels.builder(target, InsecureChannelCredentials.create(), null, Channels.serviceConfig(4)).build();
  }

  private static long cpuNanos() {
    return ManagementFactory.getPlatformMXBean(OperatingSystemMXBean.class).getProcessCpuTime();
  }

  private static long heapBytes() {
    System.gc();
    return ManagementFactory.getMemoryMXBean().getHeapMemoryUsage().getUsed();
  }

  /** The server in a process of its own. */
  private record Server(Process process, String target) implements AutoCloseable {
    static Server start(int pauseMillis) throws Exception {
      var java = ProcessHandle.current().info().command().orElseThrow();
      var command = List.of(java, "-cp", System.getProperty("java.class.path"), ClientBenchmark.class.getName());
      var builder = new ProcessBuilder(new ArrayList<>(command));
      builder.command().addAll(List.of("serve", String.valueOf(pauseMillis)));
      var process = builder.redirectError(ProcessBuilder.Redirect.INHERIT).start();
      return new Server(process, process.inputReader().readLine());
    }

    @Override
    public void close() {
      process.destroy();
    }
  }
}
