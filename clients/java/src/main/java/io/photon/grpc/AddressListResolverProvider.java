package io.photon.grpc;

import com.google.common.net.HostAndPort;
import io.grpc.EquivalentAddressGroup;
import io.grpc.NameResolver;
import io.grpc.NameResolverProvider;
import io.grpc.StatusOr;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.net.URI;
import java.util.Arrays;
import java.util.Collection;
import java.util.List;

/** Replicas named one by one, {@code ipv4:10.0.0.1:50051,10.0.0.2:50051}, as gRPC's other languages take them. */
public final class AddressListResolverProvider extends NameResolverProvider {
  @Override
  public String getDefaultScheme() {
    return "ipv4";
  }

  @Override
  public NameResolver newNameResolver(URI target, NameResolver.Args args) {
    if (!getDefaultScheme().equals(target.getScheme())) {
      return null;
    }
    var names = target.getSchemeSpecificPart();
    var first = names.split(",")[0];
    var groups = Arrays.stream(names.split(",")).map(AddressListResolverProvider::group).toList();
    return new NameResolver() {
      @Override
      public String getServiceAuthority() {
        return first;
      }

      @Override
      public void start(Listener2 listener) {
        listener.onResult(ResolutionResult.newBuilder().setAddressesOrError(StatusOr.fromValue(groups)).build());
      }

      @Override
      public void shutdown() {}
    };
  }

  @Override
  public Collection<Class<? extends SocketAddress>> getProducedSocketAddressTypes() {
    return List.of(InetSocketAddress.class);
  }

  @Override
  protected boolean isAvailable() {
    return true;
  }

  /** Below DNS, which stays the resolver of a target without a scheme. */
  @Override
  protected int priority() {
    return 4;
  }

  private static EquivalentAddressGroup group(String name) {
    var address = HostAndPort.fromString(name);
    return new EquivalentAddressGroup(new InetSocketAddress(address.getHost(), address.getPort()));
  }
}
