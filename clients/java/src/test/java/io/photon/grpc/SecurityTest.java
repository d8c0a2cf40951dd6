package io.photon.grpc;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.List;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/** Certificates on both sides and API keys, against a server that demands them. */
class SecurityTest {
  private static final String KEY = "sesame";
  private static final Request REQUEST = Request.text("x").maxTokens(1);

  @TempDir static Path files;

  @Test
  void whoIsLetIn() throws Exception {
    openssl("ca", "-x509", "-addext", "basicConstraints=critical,CA:TRUE");
    sign("server");
    sign("client");
    var digest = MessageDigest.getInstance("SHA-256").digest(KEY.getBytes(StandardCharsets.UTF_8));
    var block = "[[key]]\nname = \"a\"\nscopes = [\"generate\"]\nsha256 = \"%s\"\n";
    var keys = Files.writeString(files.resolve("keys.toml"), block.formatted(HexFormat.of().formatHex(digest)));
    keys.toFile().setReadable(false, false);
    keys.toFile().setReadable(true, true);
    var server =
        Replica.start(
            "--tls-cert", file("server.pem"), "--tls-key", file("server.key"),
            "--tls-client-ca", file("ca.pem"), "--api-keys-file", keys.toString());
    try (server) {
      try (var ours = trusted(server).apiKey(KEY).build()) {
        ours.waitUntilReady(Replica.PATIENCE);
        assertEquals(1, ours.generate(REQUEST).usage().outputTokens());
        assertThrows(PhotonException.ScopeRequired.class, ours::models);
      }
      assertRefused(PhotonException.MissingCredentials.class, trusted(server));
      assertRefused(PhotonException.InvalidCredentials.class, trusted(server).apiKey("wrong"));
      assertRefused(PhotonException.Unreachable.class, Client.builder(server.target).apiKey(KEY));
      assertRefused(
          PhotonException.Unreachable.class, Client.builder(server.target).tls(path("ca.pem")).apiKey(KEY));
    }
  }

  private static Client.Builder trusted(Replica server) throws IOException {
    return Client.builder(server.target).tls(path("ca.pem"), path("client.pem"), path("client.key"));
  }

  private static void assertRefused(Class<? extends PhotonException> kind, Client.Builder builder) {
    try (var client = builder.retries(0).build()) {
      assertThrows(kind, () -> client.generate(REQUEST));
    }
  }

  private static void sign(String name) throws Exception {
    openssl(name, "-x509", "-CA", file("ca.pem"), "-CAkey", file("ca.key"), "-addext", "subjectAltName=IP:127.0.0.1");
  }

  private static void openssl(String name, String... more) throws Exception {
    var command = new ArrayList<>(List.of("openssl", "req", "-new", "-newkey", "ec", "-pkeyopt"));
    command.addAll(List.of("ec_paramgen_curve:P-256", "-nodes", "-keyout", file(name + ".key")));
    command.addAll(List.of("-subj", "/CN=" + name, "-days", "2", "-out", file(name + ".pem")));
    command.addAll(List.of(more));
    assertTrue(new ProcessBuilder(command).redirectErrorStream(true).start().waitFor() == 0, command.toString());
  }

  private static Path path(String name) {
    return files.resolve(name);
  }

  private static String file(String name) {
    return path(name).toString();
  }
}
