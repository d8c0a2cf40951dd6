package io.photon.grpc;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;

import com.google.gson.Gson;
import com.google.gson.JsonParser;
import java.nio.file.Files;
import java.nio.file.Path;
import org.junit.jupiter.api.Test;

/** The client calls with the one list that all clients are held to. */
class ServiceConfigTest {
  @Test
  void theListIsTheRepositorys() throws Exception {
    var list = JsonParser.parseString(Files.readString(Path.of("..", "service_config.json")));
    assertEquals(list, new Gson().toJsonTree(Channels.serviceConfig(4)));
    assertEquals(list, new Gson().toJsonTree(Channels.serviceConfig(9)));
  }

  @Test
  void retriesCanBeFewerOrNone() {
    assertEquals(3.0, attempts(2));
    assertFalse(Channels.serviceConfig(0).containsKey("methodConfig"));
    assertFalse(Channels.serviceConfigOfAnyState(4).containsKey("healthCheckConfig"));
  }

  private static double attempts(int retries) {
    return new Gson()
        .toJsonTree(Channels.serviceConfig(retries))
        .getAsJsonObject()
        .getAsJsonArray("methodConfig")
        .get(0)
        .getAsJsonObject()
        .getAsJsonObject("retryPolicy")
        .get("maxAttempts")
        .getAsDouble();
  }
}
