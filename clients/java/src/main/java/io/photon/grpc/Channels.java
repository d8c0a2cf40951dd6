package io.photon.grpc;

import com.google.gson.Gson;
import com.google.gson.reflect.TypeToken;
import io.grpc.ChannelCredentials;
import io.grpc.netty.NettyChannelBuilder;
import io.netty.channel.EventLoopGroup;
import io.netty.channel.nio.NioEventLoopGroup;
import io.netty.channel.socket.nio.NioDomainSocketChannel;
import io.netty.util.concurrent.DefaultThreadFactory;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.UncheckedIOException;
import java.net.UnixDomainSocketAddress;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;

/** The connection: what it tolerates, how it notices that the other side is gone, what is tried again. */
final class Channels {
  /** gRPC's own limit is five attempts in all. */
  static final int MAX_RETRIES = 4;

  /** In step with the server, which accepts a ping every 10 s: a silent drop is noticed within 18 s. */
  private static final Duration KEEPALIVE = Duration.ofSeconds(10);

  private static final Duration KEEPALIVE_TIMEOUT = Duration.ofSeconds(8);

  /** A request larger than this is sent once. */
  private static final long RETRY_BUFFER_BYTES = 4L << 20;

  private static final String UNIX = "unix:";

  /**
   * A builder for HOST:PORT, unix:PATH, ipv4:ADDRESS:PORT,ADDRESS:PORT or any name that gRPC resolves. A Unix socket
   * is served by {@code group}.
   */
  static NettyChannelBuilder builder(
      String target, ChannelCredentials credentials, EventLoopGroup group, Map<String, Object> serviceConfig) {
    var builder =
        target.startsWith(UNIX)
            ? unixSocket(target.substring(UNIX.length()), credentials, group)
            : NettyChannelBuilder.forTarget(target, credentials);
    builder
        .keepAliveTime(KEEPALIVE.toSeconds(), TimeUnit.SECONDS)
        .keepAliveTimeout(KEEPALIVE_TIMEOUT.toSeconds(), TimeUnit.SECONDS)
        // The server says what it accepts; what it sends is what was asked for.
        .maxInboundMessageSize(Integer.MAX_VALUE)
        .perRpcBufferLimit(RETRY_BUFFER_BYTES)
        .defaultServiceConfig(serviceConfig)
        .enableRetry();
    return builder;
  }

  /** Threads of a Unix socket; TCP shares gRPC's own. */
  static EventLoopGroup group(String target) {
    return target.startsWith(UNIX)
        ? new NioEventLoopGroup(1, new DefaultThreadFactory("photon-grpc-unix", true))
        : null;
  }

  /** The file that every client is held to, with so many retries; calls go to servers that are ready. */
  static Map<String, Object> serviceConfig(int retries) {
    var config = read();
    for (var method : objects(config.get("methodConfig"))) {
      for (var policy : objects(List.of(method.get("retryPolicy")))) {
        policy.put("maxAttempts", Math.min(retries, MAX_RETRIES) + 1.0);
      }
    }
    if (retries == 0) {
      config.remove("methodConfig");
    }
    return config;
  }

  /** The same, and calls go to any server: one that loads or drains still says so, and tells its models. */
  static Map<String, Object> serviceConfigOfAnyState(int retries) {
    var config = serviceConfig(retries);
    config.remove("healthCheckConfig");
    return config;
  }

  @SuppressWarnings("unchecked")
  static Map<String, Object> retryPolicy() {
    return (Map<String, Object>) objects(read().get("methodConfig")).get(0).get("retryPolicy");
  }

  private static Map<String, Object> read() {
    try (var file = Channels.class.getResourceAsStream("service_config.json");
        var reader = new InputStreamReader(file, StandardCharsets.UTF_8)) {
      return new Gson().fromJson(reader, new TypeToken<HashMap<String, Object>>() {});
    } catch (IOException missing) {
      throw new UncheckedIOException(missing);
    }
  }

  private static NettyChannelBuilder unixSocket(
      String path, ChannelCredentials credentials, EventLoopGroup group) {
    return NettyChannelBuilder.forAddress(UnixDomainSocketAddress.of(path), credentials)
        .overrideAuthority("localhost")
        .channelType(NioDomainSocketChannel.class, UnixDomainSocketAddress.class)
        .eventLoopGroup(group);
  }

  @SuppressWarnings("unchecked")
  private static List<Map<String, Object>> objects(Object list) {
    return (List<Map<String, Object>>) list;
  }

  private Channels() {}
}
