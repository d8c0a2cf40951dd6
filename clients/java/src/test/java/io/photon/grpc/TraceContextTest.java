package io.photon.grpc;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.grpc.Metadata;
import io.opentelemetry.api.trace.Span;
import io.opentelemetry.api.trace.SpanContext;
import io.opentelemetry.api.trace.TraceFlags;
import io.opentelemetry.api.trace.TraceState;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** The caller's span goes with its calls, those too that other threads begin. */
@Timeout(60)
class TraceContextTest {
  private static final String TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
  private static final Span SPAN =
      Span.wrap(
          SpanContext.create(
              "0af7651916cd43dd8448eb211c80319c",
              "b7ad6b7169203331",
              TraceFlags.getSampled(),
              TraceState.builder().put("vendor", "1").build()));

  @Test
  void aStreamThatGoesOnHasTheSpanInWhichItWasAskedFor() throws Exception {
    try (var server = new FakeServer(1, true);
        var client = Client.connect(server.target())) {
      server.standsAfter = 5;
      GenerationStream stream;
      try (var scope = SPAN.makeCurrent()) {
        stream = client.stream(Request.text("x").seed(1).maxTokens(20));
      }
      stream.next();
      server.kill();
      server.standsAfter = Integer.MAX_VALUE;
      server.restart();
      stream.forEach(delta -> {});
      assertTrue(server.headers.size() > 1);
      assertTold(server, Collections.nCopies(server.headers.size(), TRACEPARENT));
      assertEquals(Collections.nCopies(server.headers.size(), "vendor=1"), told(server, "tracestate"));
    }
  }

  @Test
  void everyKindOfCallHasIt() throws Exception {
    try (var server = new FakeServer(0, true);
        var client = Client.connect(server.target())) {
      Multiplex many;
      try (var scope = SPAN.makeCurrent()) {
        many = client.multiplex();
        client.generate(Request.text("x"));
        client.generateAsync(Request.text("x")).join();
      }
      many.generate(Request.text("x").maxTokens(1));
      many.close();
      assertTold(server, List.of(TRACEPARENT, TRACEPARENT, TRACEPARENT));
    }
  }

  @Test
  void bothCallsOfAHedgeHaveIt() throws Exception {
    try (var server = new FakeServer(0, false);
        var client = Client.connect(server.target())) {
      try (var scope = SPAN.makeCurrent()) {
        var hedged = client.generateAsync(Request.text("x").hedgeAfter(Duration.ofMillis(1)));
        while (server.headers.size() < 2) {
          Thread.sleep(1);
        }
        hedged.cancel(true);
      }
      assertTold(server, List.of(TRACEPARENT, TRACEPARENT));
    }
  }

  @Test
  void withoutASpanNothingIsSentAndWhatTheCallerGivesStays() throws Exception {
    try (var server = new FakeServer(0, true);
        var client = Client.connect(server.target());
        var own = Client.builder(server.target()).metadata("traceparent", "own").build()) {
      client.generate(Request.text("x"));
      try (var scope = SPAN.makeCurrent()) {
        own.generate(Request.text("x"));
      }
      var expected = new ArrayList<String>();
      expected.add(null);
      expected.add("own");
      assertTold(server, expected);
    }
  }

  private static void assertTold(FakeServer server, List<String> traceparents) {
    assertEquals(traceparents, told(server, "traceparent"));
  }

  private static List<String> told(FakeServer server, String name) {
    var key = Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER);
    var found = new ArrayList<String>();
    for (var each : server.headers) {
      var values = each.getAll(key);
      found.add(values == null ? null : String.join(" and ", values));
    }
    return found;
  }
}
