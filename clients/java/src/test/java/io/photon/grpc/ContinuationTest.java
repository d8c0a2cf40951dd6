package io.photon.grpc;

import static io.photon.grpc.ScriptedServer.failure;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.grpc.Status;
import io.photon.grpc.ScriptedServer.Script;
import io.photon.grpc.v1.GenerationStart;
import io.photon.grpc.v1.Output;
import io.photon.grpc.v1.StreamGenerateResponse;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.regex.Pattern;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** A resumed stream tells whether its continuation is bit-exact; all clients have the rule of continuations.json. */
@Timeout(60)
class ContinuationTest {
  private static final Path RULE = Path.of("..", "continuations.json");
  private static final Pattern CASE =
      Pattern.compile("\"before\": \"(.*?)\", \"after\": \"(.*?)\", \"bit_exact\": (true|false)");
  private static final Request REQUEST = Request.text("x");

  private static StreamGenerateResponse begun(String version) {
    return StreamGenerateResponse.newBuilder()
        .setStart(GenerationStart.newBuilder().setRequestId("r-1").setNumericsVersion(version))
        .addDeltas(Output.newBuilder().setText("a").addTokenIds(1))
        .build();
  }

  private static StreamGenerateResponse done(String version) {
    var message = ScriptedServer.DONE.toBuilder();
    message.getStartBuilder().setNumericsVersion(version);
    return message.build();
  }

  @Test
  void aContinuationIsBitExactAsTheRuleSays() throws Exception {
    var cases = CASE.matcher(Files.readString(RULE)).results().toList();
    assertEquals(7, cases.size());
    for (var each : cases) {
      var isBitExact = Boolean.parseBoolean(each.group(3));
      try (var server = new ScriptedServer();
          var client = Client.connect(server.target());
          var many = client.multiplex()) {
        server.script =
            request ->
                request.hasContinueFrom()
                    ? Script.of(done(each.group(2)))
                    : Script.failing(failure(Status.Code.UNAVAILABLE, "ENGINE_FAILURE"), begun(each.group(1)));
        for (var calls : List.of(client, many)) {
          try (var stream = calls.stream(REQUEST)) {
            var texts = new ArrayList<String>();
            stream.forEach(delta -> texts.add(delta.text()));
            assertEquals(List.of("a", "done"), texts);
            assertEquals(isBitExact, stream.isBitExact(), each.group());
            assertEquals(each.group(1), stream.start().numericsVersion());
          }
        }
        var whole = many.generate(REQUEST);
        assertEquals(isBitExact, whole.isBitExact(), each.group());
        assertEquals(each.group(1), whole.numericsVersion());
      }
    }
  }

  @Test
  void anUncutStreamIsBitExact() throws Exception {
    try (var server = new ScriptedServer();
        var client = Client.connect(server.target())) {
      for (var version : List.of("", "a1", "fast-a1")) {
        server.script = request -> Script.of(done(version));
        try (var stream = client.stream(REQUEST)) {
          assertTrue(stream.hasNext());
          assertTrue(stream.isBitExact());
        }
        assertTrue(client.generate(REQUEST).isBitExact());
      }
    }
  }
}
